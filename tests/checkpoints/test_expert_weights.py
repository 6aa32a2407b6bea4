"""Parameters of all experts, and models within multimodal ones: which tensors fill them, and that a device reads only its part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.loader import load
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError
from checkpoints.weight_map import Weight, WeightMap
from tests.checkpoints import tiny

EXPERTS, D, F = 8, 16, 24
EACH = "model.layers.{layer}.mlp.experts.{expert}."
FUSED = "model.layers.{layer}.feed_forward.experts."
WEIGHTS = WeightMap(
    {
        "blocks.{layer}.gate_up": Weight((EACH + "gate_proj.weight", EACH + "up_proj.weight"), transpose=True, axis=-2),
        "blocks.{layer}.down": Weight((EACH + "down_proj.weight",), transpose=True),
        "norm": Weight(("model.norm.weight",)),
    },
    ignored=("vision_tower.*",),
    renamed=(("model.language_model.", "model."), ("language_model.", "")),
)
SHAPES = {"blocks.0.gate_up": (EXPERTS, D, 2, F), "blocks.1.gate_up": (EXPERTS, D, 2, F), "blocks.1.down": (EXPERTS, F, D), "norm": (D,)}


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"model.norm.weight": (D,)}
    for expert in range(EXPERTS):
        for layer, part in ((0, "gate"), (0, "up"), (1, "gate"), (1, "up"), (1, "down")):
            shapes[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"] = (D, F) if part == "down" else (F, D)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


ARRAYS = tensors()


def expert_array(layer: int, expert: int, part: str) -> np.ndarray:
    return ARRAYS[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"]


def expected(path: str) -> np.ndarray:
    if path == "norm":
        return ARRAYS["model.norm.weight"]
    layer, part = int(path.split(".")[1]), path.split(".")[2]
    values = np.empty(SHAPES[path], np.float32)
    for expert in range(EXPERTS):
        if part == "down":
            values[expert] = expert_array(layer, expert, "down").T
        else:
            for place, of_place in enumerate(("gate", "up")):
                for column in range(F):
                    values[expert, :, place, column] = expert_array(layer, expert, of_place)[column]
    return values


def mesh(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices())[:num_devices], ("x",))


def targets(num_devices: int, spec: P, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    on = mesh(num_devices)
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(on, spec if len(shape) >= len(spec) else P()))
        for path, shape in shapes.items()
    }


def opened(folder: Path, arrays: Mapping[str, np.ndarray]) -> SafetensorsSource:
    tiny.write_safetensors(folder, dict(arrays), num_files=2)
    return SafetensorsSource(folder)


SPLITS = [P(), P("x"), P(None, "x"), P(None, None, None, "x"), P(None, None, "x")]


@pytest.mark.parametrize("spec", SPLITS, ids=str)
def test_each_experts_tensors_fill_its_part_however_it_is_split(tmp_path: Path, spec: P) -> None:
    source = opened(tmp_path, ARRAYS)
    for path, array in load(source, targets(2, spec, SHAPES), WEIGHTS).items():
        np.testing.assert_array_equal(array, expected(path), err_msg=path)
    assert source.bytes_read == sum(array.nbytes for array in ARRAYS.values())


def reads_of(source: SafetensorsSource, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each read's tensor and bytes, from now on."""
    found: list[tuple[str, int]] = []
    read = source.read

    def noting(name: str, *asked):
        values = read(name, *asked)
        found.append((name, values.nbytes))
        return values

    monkeypatch.setattr(source, "read", noting)
    return found


def test_a_device_that_holds_some_experts_reads_those_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(tmp_path, ARRAYS)
    reads = reads_of(source, monkeypatch)
    of_one = targets(4, P("x"), {"blocks.0.gate_up": SHAPES["blocks.0.gate_up"]})["blocks.0.gate_up"]
    # As on a host that sees one device of the mesh: its shard is all that is asked for.
    asked: list[tuple[slice, ...]] = []

    def only_the_second(shape, sharding, shard, dtype):
        index = list(sharding.addressable_devices_indices_map(shape).values())[1]
        asked.append(index)
        return shard(index)

    monkeypatch.setattr(jax, "make_array_from_callback", only_the_second)
    only = {name: array for name, array in ARRAYS.items() if ".0.mlp." in name}
    rest = WeightMap(WEIGHTS.weights, ignored=("model.layers.1.*", "model.norm.*"))
    loaded = load(source, {"blocks.0.gate_up": of_one}, rest)["blocks.0.gate_up"]
    np.testing.assert_array_equal(loaded, expected("blocks.0.gate_up")[2:4])
    assert asked[0][0] == slice(2, 4)
    assert {name for name, _ in reads} == {name for name in only if ".experts.2." in name or ".experts.3." in name}
    assert source.bytes_read == 2 * 2 * D * F * 4


def test_a_device_that_holds_half_the_columns_reads_half_of_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(tmp_path, ARRAYS)
    reads = reads_of(source, monkeypatch)
    load(source, targets(2, P(None, None, None, "x"), SHAPES), WEIGHTS)
    for expert in range(EXPERTS):
        sizes = [size for name, size in reads if name == f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"]
        assert sizes == [D * F // 2 * 4] * 2


@pytest.mark.parametrize("spec", SPLITS, ids=str)
def test_a_tensor_of_all_experts_fills_the_parameter_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: P) -> None:
    random = np.random.default_rng(1)
    gate_up = random.standard_normal((EXPERTS, D, 2 * F), np.float32)
    down = random.standard_normal((EXPERTS, F, D), np.float32)
    names = {"model.layers.0.feed_forward.experts.gate_up_proj": gate_up, "model.layers.0.feed_forward.experts.down_proj": down}
    weights = WeightMap(
        {"blocks.{layer}.gate_up": Weight((FUSED + "gate_up_proj",)), "blocks.{layer}.down": Weight((FUSED + "down_proj",))}
    )
    source = opened(tmp_path, names)
    reads = reads_of(source, monkeypatch)
    shapes = {"blocks.0.gate_up": (EXPERTS, D, 2, F), "blocks.0.down": (EXPERTS, F, D)}
    loaded = load(source, targets(2, spec, shapes), weights)
    np.testing.assert_array_equal(loaded["blocks.0.gate_up"], gate_up.reshape(EXPERTS, D, 2, F))
    np.testing.assert_array_equal(loaded["blocks.0.down"], down)
    assert source.bytes_read == gate_up.nbytes + down.nbytes  # each device its half, though the halves of F lie apart
    assert sum(size for _, size in reads) == source.bytes_read


def refused(folder: Path, arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> str:
    source = opened(folder, arrays)
    with pytest.raises(CheckpointError) as caught:
        load(source, targets(1, P(), shapes), WEIGHTS)
    assert source.bytes_read == 0
    return str(caught.value)


def test_an_experts_missing_surplus_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert f"tensor '{name}' is missing" in refused(tmp_path / "a", {n: a for n, a in ARRAYS.items() if n != name})
    message = refused(tmp_path / "b", {**ARRAYS, name: np.zeros((D, F), np.float32)})
    assert f"tensor '{name}' has shape [16, 24], but the configuration calls for [16, 2, 24] side by side transposed" in message
    assert "experts.4." not in message
    fewer = {path: (EXPERTS - 1, *shape[1:]) if len(shape) > 1 else shape for path, shape in SHAPES.items()}
    assert "'model.layers.1.mlp.experts.7.down_proj.weight' and 2 more are in the checkpoint but not in a model" in refused(
        tmp_path / "c", ARRAYS, fewer
    )


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_text_model_within_another_is_found_and_its_errors_say_the_files_names(tmp_path: Path, prefix: str) -> None:
    theirs = {prefix + (n if prefix == "language_model." else n.removeprefix("model.")): a for n, a in ARRAYS.items()}
    vision = {"vision_tower.layers.0.weight": np.ones((2, 2), np.float32)}
    for path, array in load(opened(tmp_path / "a", {**theirs, **vision}), targets(2, P("x"), SHAPES), WEIGHTS).items():
        np.testing.assert_array_equal(array, expected(path), err_msg=path)
    name = next(name for name in theirs if name.endswith("norm.weight"))
    assert f"tensor '{name}' is missing" in refused(tmp_path / "b", {n: a for n, a in theirs.items() if n != name})
    odd = prefix + "layers.0.odd"
    assert f"tensor '{odd}' is in the checkpoint but not" in refused(tmp_path / "c", {**theirs, odd: np.ones(2, np.float32)})
    assert f"tensor '{name}' has shape [2]" in refused(tmp_path / "d", {**theirs, name: np.ones(2, np.float32)})
    both = {**theirs, "model.norm.weight": np.ones(D, np.float32)}
    assert "are both 'model.norm.weight' of this model" in refused(tmp_path / "e", both)
