"""Loading: each device reads its own part and no more; what does not fit the model is refused before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.gguf_source import GGUFSource
from checkpoints.loader import load
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError
from checkpoints.weight_map import Weight, WeightMap
from tests.checkpoints import tiny

LAYER = "model.layers.{layer}."
WEIGHTS = WeightMap(
    {
        "embedding.table": Weight(("model.embed_tokens.weight",)),
        "norm.scale": Weight(("model.norm.weight",), axis=-2),  # of no meaning to a single tensor, but models' tables may say so
        "blocks.{layer}.norm.scale": Weight((LAYER + "input_layernorm.weight",)),
        "blocks.{layer}.mlp_norm.scale": Weight((LAYER + "post_attention_layernorm.weight",)),
        "blocks.{layer}.qkv.kernel": Weight(tuple(f"{LAYER}self_attn.{p}_proj.weight" for p in "qkv"), transpose=True, axis=-2),
        "blocks.{layer}.o.kernel": Weight((f"{LAYER}self_attn.o_proj.weight",), transpose=True),
        "blocks.{layer}.gate_up.kernel": Weight(tuple(f"{LAYER}mlp.{p}_proj.weight" for p in ("gate", "up")), transpose=True, axis=1),
        "blocks.{layer}.down.kernel": Weight((f"{LAYER}mlp.down_proj.weight",), transpose=True),
    }
)
SHAPES = {
    "norm.scale": (tiny.HIDDEN,),
    "mlp_norm.scale": (tiny.HIDDEN,),
    "qkv.kernel": (tiny.HIDDEN, tiny.KV_HEADS, tiny.HEADS // tiny.KV_HEADS + 2, tiny.HEAD),
    "o.kernel": (tiny.HEADS, tiny.HEAD, tiny.HIDDEN),
    "gate_up.kernel": (tiny.HIDDEN, 2, tiny.MLP),
    "down.kernel": (tiny.MLP, tiny.HIDDEN),
}
SPLIT = {  # over two devices, as tensor parallelism does
    "qkv.kernel": P(None, "tensor"),
    "o.kernel": P("tensor"),
    "gate_up.kernel": P(None, None, "tensor"),
    "down.kernel": P("tensor"),
    "embedding.table": P("tensor"),
}
ARRAYS = tiny.tensors()
NUM_BYTES = sum(array.nbytes for array in ARRAYS.values())


def mesh(*devices: int) -> Mesh:
    return Mesh(np.array(jax.devices())[list(devices)], ("tensor",))


def targets(on: Mesh, split: Mapping[str, P], dtype: jnp.dtype = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {"embedding.table": (tiny.VOCAB, tiny.HIDDEN), "norm.scale": (tiny.HIDDEN,)}
    shapes |= {f"blocks.{layer}.{part}": shape for layer in range(tiny.LAYERS) for part, shape in SHAPES.items()}
    specs = {path: split.get(path, split.get(path.split(".", 2)[-1], P())) for path in shapes}
    return {path: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, specs[path])) for path, shape in shapes.items()}


def expected(path: str, tensors: Mapping[str, np.ndarray] = ARRAYS) -> np.ndarray:
    """The parameter, written out from the tensors that fill it."""
    weight, part = WEIGHTS.find(path), path.split(".", 2)[-1]
    arrays = [tensors[name].T if weight.transpose else tensors[name] for name in weight.tensors]
    if part == "qkv.kernel":
        q, k, v = (array.reshape(tiny.HIDDEN, tiny.KV_HEADS, -1, tiny.HEAD) for array in arrays)
        return np.concatenate([q, k, v], axis=2)
    if part == "gate_up.kernel":
        return np.stack(arrays, axis=1)
    return arrays[0].reshape(SHAPES[part]) if path.startswith("blocks") else arrays[0]


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsSource:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    return SafetensorsSource(tmp_path)


def test_one_device_gets_every_tensor_once(source: SafetensorsSource) -> None:
    loaded = load(source, targets(mesh(0), {}), WEIGHTS)
    for path, array in loaded.items():
        np.testing.assert_array_equal(array, expected(path), err_msg=path)
    assert source.bytes_read == NUM_BYTES


def test_devices_that_share_a_tensor_out_read_it_once_between_them(source: SafetensorsSource) -> None:
    loaded = load(source, targets(mesh(0, 1), SPLIT), WEIGHTS)
    for path, array in loaded.items():
        np.testing.assert_array_equal(array, expected(path), err_msg=path)
        assert all(shard.data.shape != array.shape for shard in array.addressable_shards) == (
            path.split(".", 2)[-1] in SPLIT or path in SPLIT
        )
    assert source.bytes_read == NUM_BYTES


def test_devices_that_hold_the_same_read_it_once(source: SafetensorsSource) -> None:
    loaded = load(source, targets(mesh(0, 1, 2, 3), {}), WEIGHTS)
    assert len(loaded["norm.scale"].addressable_shards) == 4
    assert source.bytes_read == NUM_BYTES


@pytest.mark.parametrize("path", ["qkv.kernel", "o.kernel", "gate_up.kernel", "down.kernel"])
def test_each_device_reads_its_half_alone(source: SafetensorsSource, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    sizes = []
    read = source.read
    monkeypatch.setattr(source, "read", lambda *asked: (part := read(*asked), sizes.append((asked[0], part.nbytes)))[0])
    load(source, targets(mesh(0, 1), SPLIT), WEIGHTS)
    for name in WEIGHTS.find(f"blocks.1.{path}").tensors:
        assert [size for asked, size in sizes if asked == name] == [ARRAYS[name].nbytes // 2] * 2


def test_a_split_of_an_inner_dimension_is_cut_from_what_covers_it(source: SafetensorsSource) -> None:
    split = {"qkv.kernel": P(None, None, None, "tensor"), "o.kernel": P(None, "tensor")}  # by head size, across heads
    for path, array in load(source, targets(mesh(0, 1), split), WEIGHTS).items():
        np.testing.assert_array_equal(array, expected(path), err_msg=path)


def test_a_split_may_cut_through_the_tensors_that_lie_side_by_side(source: SafetensorsSource) -> None:
    split = {"qkv.kernel": P(None, None, "tensor"), "gate_up.kernel": P(None, "tensor")}
    for path, array in load(source, targets(mesh(0, 1), split), WEIGHTS).items():
        np.testing.assert_array_equal(array, expected(path), err_msg=path)
    assert source.bytes_read == NUM_BYTES


def test_vectors_of_many_layers_are_stacked(source: SafetensorsSource) -> None:
    paths = [f"blocks.{layer}.{norm}.scale" for layer in range(tiny.LAYERS) for norm in ("mlp_norm", "norm")]
    shapes = {path: target for path, target in targets(mesh(0, 1), {}).items() if path not in paths}
    stacked = jax.ShapeDtypeStruct((len(paths), tiny.HIDDEN), jnp.float32, sharding=NamedSharding(mesh(0, 1), P()))
    loaded = load(source, {**shapes, "norms": stacked}, WEIGHTS.with_stack("norms", paths))
    np.testing.assert_array_equal(loaded["norms"], np.stack([expected(path) for path in paths]))


def test_two_meshes_load_from_one_source_in_another_type(source: SafetensorsSource) -> None:
    prefill = load(source, targets(mesh(0, 1), SPLIT), WEIGHTS)
    decode = load(source, targets(mesh(2), {}, jnp.bfloat16), WEIGHTS)
    for path, array in decode.items():
        assert array.dtype == jnp.bfloat16
        assert array.devices() == {jax.devices()[2]}
        np.testing.assert_array_equal(array, np.asarray(prefill[path]).astype(jnp.bfloat16))


def test_a_gguf_file_loads_like_the_folder_it_was_made_from(tmp_path: Path) -> None:
    values = tiny.write_gguf(tmp_path / "tiny.gguf")
    source = GGUFSource(tmp_path / "tiny.gguf")
    for path, array in load(source, targets(mesh(0, 1), SPLIT), WEIGHTS).items():
        np.testing.assert_array_equal(array, expected(path, values), err_msg=path)


def refused(tmp_path: Path, arrays: dict[str, np.ndarray], weights: WeightMap = WEIGHTS) -> str:
    tiny.write_safetensors(tmp_path, arrays)
    source = SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(source, targets(mesh(0), {}), weights)
    assert source.bytes_read == 0
    return str(caught.value)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    without = {name: array for name, array in ARRAYS.items() if "layers.1.mlp" not in name and name != "model.norm.weight"}
    message = refused(tmp_path, without)
    assert "tensors 'model.layers.1.mlp.down_proj.weight', 'model.layers.1.mlp.gate_proj.weight'" in message
    assert "and 1 more are missing, which this model's configuration calls for" in message


def test_surplus_tensors_are_named(tmp_path: Path) -> None:
    message = refused(tmp_path, {**ARRAYS, "model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)})
    assert "tensor 'model.layers.0.self_attn.q_norm.weight' is in the checkpoint but not in a model of this configuration" in message


def test_known_leftovers_are_let_be(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": ARRAYS["model.embed_tokens.weight"].copy(),
    }
    tiny.write_safetensors(tmp_path, {**ARRAYS, **extra})
    weights = WeightMap(WEIGHTS.weights, ignored=("lm_head.weight",))
    wanted = targets(mesh(0), {})
    assert load(SafetensorsSource(tmp_path), wanted, weights).keys() == wanted.keys()


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (
            "model.layers.1.self_attn.k_proj.weight",
            (tiny.HEADS * tiny.HEAD, tiny.HIDDEN),
            "[64, 2, 4, 16] side by side transposed",
        ),
        ("model.layers.1.mlp.up_proj.weight", (tiny.HIDDEN, tiny.MLP), "[64, 2, 96] side by side transposed"),
        ("model.norm.weight", (tiny.HIDDEN, 1), "[64]"),
        ("model.embed_tokens.weight", (tiny.VOCAB // 2, tiny.HIDDEN), "[40, 64]"),
    ],
)
def test_a_misshapen_tensor_is_named_with_what_was_expected(tmp_path: Path, name: str, shape: tuple[int, ...], wanted: str) -> None:
    message = refused(tmp_path, {**ARRAYS, name: np.zeros(shape, np.float32)})
    assert f"tensor '{name}' has shape {list(shape)}" in message
    assert f", but the configuration calls for {wanted} (parameter" in message


def test_a_parameter_without_an_entry_is_named(tmp_path: Path) -> None:
    weights = WeightMap({path: weight for path, weight in WEIGHTS.weights.items() if "gate_up" not in path})
    assert "parameter 'blocks.0.gate_up.kernel' has no entry in the model's weight map" in refused(tmp_path, ARRAYS, weights)


def test_a_failure_in_one_tensor_leaves_nothing_loaded(source: SafetensorsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    read = source.read

    def failing(name: str, *asked):
        if name == "model.norm.weight":
            raise CheckpointError("the disk is gone")
        return read(name, *asked)

    monkeypatch.setattr(source, "read", failing)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        load(source, targets(mesh(0), {}), WEIGHTS)
