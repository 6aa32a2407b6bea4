"""fp8 in blocks and int4 in groups: values as each format's description gives them, slices, bytes; and what is not of these, refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from checkpoints.loader import load
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import FP8_BLOCKS, INT4_GROUPS, CheckpointError, StoredArray
from checkpoints.weight_map import Weight, WeightMap

X = "model.layers.0.mlp.experts.0.gate_proj."
NORM = "model.norm.weight"
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT4: dict[str, Any] = {  # as Kimi K2's config.json has it
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "dynamic": False,
                "block_structure": None,
            },
        }
    },
}
OUT, IN = 300, 448  # neither of whole blocks of 128; rows of whole groups


def fp8_tensors(scale_dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (OUT, IN), np.uint8)
    codes[codes & 0x7F == 0x7F] = 3  # the two that stand for no number
    scale = random.uniform(1e-4, 2, (3, 4)).astype(scale_dtype)
    return {
        X + "weight": codes.view(ml_dtypes.float8_e4m3fn),
        X + "weight_scale_inv": scale,
        NORM: random.standard_normal(8, np.float32),
    }


def e4m3(code: int) -> float:
    """One code: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def fp8_values(tensors: dict[str, np.ndarray]) -> np.ndarray:
    codes, scale = tensors[X + "weight"].view(np.uint8), tensors[X + "weight_scale_inv"].astype(np.float32)
    values = np.empty((OUT, IN), np.float32)
    for row in range(OUT):
        for column in range(IN):
            values[row, column] = np.float32(e4m3(int(codes[row, column]))) * scale[row // 128, column // 128]
    return values


def int4_tensors(scale_dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        X + "weight_packed": random.integers(-(2**31), 2**31, (OUT, IN // 8), np.int64).astype(np.int32),
        X + "weight_scale": random.uniform(1e-3, 1, (OUT, IN // 32)).astype(scale_dtype),
        X + "weight_shape": np.array([OUT, IN], np.int32),
        "model.layers.0.self_attn.q_proj.weight": random.standard_normal((8, 8), np.float32),
        NORM: random.standard_normal(8, np.float32),
    }


def int4_values(tensors: dict[str, np.ndarray]) -> np.ndarray:
    packed, scale = tensors[X + "weight_packed"], tensors[X + "weight_scale"]
    values = np.empty((OUT, IN), scale.dtype)
    for row in range(OUT):
        for column in range(IN):
            integer = (int(packed[row, column // 8]) >> 4 * (column % 8) & 15) - 8
            values[row, column] = integer * float(scale[row, column // 32])  # rounded once, to the scales' type
    return values


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


FP8_TENSORS, INT4_TENSORS = fp8_tensors(), int4_tensors()
VALUES = {"fp8": fp8_values(FP8_TENSORS), "int4": int4_values(INT4_TENSORS)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantised")
    return {
        "fp8": write(folder / "fp8", FP8_TENSORS, {"quantization_config": FP8}),
        "int4": write(folder / "int4", INT4_TENSORS, {"quantization_config": INT4}),
    }


def test_fp8_reads_as_the_products_of_codes_and_scales(folders: dict[str, Path]) -> None:
    source = SafetensorsSource(folders["fp8"])
    assert set(source.names()) == {X + "weight", NORM}
    assert source.shape(X + "weight") == (OUT, IN)
    read = source.read(X + "weight")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, VALUES["fp8"])
    np.testing.assert_array_equal(source.read(NORM), FP8_TENSORS[NORM])


def test_int4_reads_as_the_products_of_integers_and_scales_in_their_type(folders: dict[str, Path]) -> None:
    source = SafetensorsSource(folders["int4"])
    assert set(source.names()) == {X + "weight", NORM, "model.layers.0.self_attn.q_proj.weight"}
    assert source.shape(X + "weight") == (OUT, IN)
    read = source.read(X + "weight")
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, VALUES["int4"])


def test_scales_of_other_types_are_taken(tmp_path: Path) -> None:
    tensors = fp8_tensors(ml_dtypes.bfloat16)  # Qwen3's
    np.testing.assert_array_equal(
        SafetensorsSource(write(tmp_path / "a", tensors, {"quantization_config": FP8})).read(X + "weight"), fp8_values(tensors)
    )
    tensors = int4_tensors(np.float16)
    read = SafetensorsSource(write(tmp_path / "b", tensors, {"quantization_config": INT4})).read(X + "weight")
    assert read.dtype == np.float16
    np.testing.assert_array_equal(read, int4_values(tensors))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_slice_is_that_part_of_the_whole_and_touches_its_own_scales_alone(
    folders: dict[str, Path], kind: str, data: st.DataObject
) -> None:
    source = SafetensorsSource(folders[kind])
    (top, bottom), (left, right) = (
        (start := data.draw(st.integers(0, size - 1)), data.draw(st.integers(start + 1, size))) for size in (OUT, IN)
    )
    read = source.read(X + "weight", (slice(top, bottom), slice(left, right)))
    np.testing.assert_array_equal(read, VALUES[kind][top:bottom, left:right])
    rows, columns = range(top, bottom), range(left, right)
    if kind == "fp8":
        num_bytes = len(rows) * len(columns) + 4 * len({row // 128 for row in rows}) * len({column // 128 for column in columns})
    else:
        num_bytes = len(rows) * (4 * len({column // 8 for column in columns}) + 2 * len({column // 32 for column in columns}))
    assert source.bytes_read == num_bytes


def test_how_a_tensor_is_stored_and_its_parts_as_they_lie(folders: dict[str, Path]) -> None:
    source = SafetensorsSource(folders["fp8"])
    stored = source.stored(X + "weight")
    assert stored.format == FP8_BLOCKS
    assert stored.parts == {
        "weight": StoredArray((OUT, IN), np.dtype(ml_dtypes.float8_e4m3fn)),
        "weight_scale_inv": StoredArray((3, 4), np.dtype(np.float32)),
    }
    assert stored.num_bytes == OUT * IN + 3 * 4 * 4
    for part in stored.parts:
        read, whole = source.read(X + "weight", None, part), FP8_TENSORS[X + part]
        assert read.dtype == whole.dtype
        assert read.tobytes() == whole.tobytes()
    before = source.bytes_read
    part_of_it = source.read(X + "weight", (slice(130, 140), slice(3, 9)), "weight")
    assert part_of_it.tobytes() == FP8_TENSORS[X + "weight"][130:140, 3:9].tobytes()
    assert source.bytes_read == before + 60

    source = SafetensorsSource(folders["int4"])
    stored = source.stored(X + "weight")
    assert (stored.format, list(stored.parts)) == (INT4_GROUPS, ["weight_packed", "weight_scale", "weight_shape"])
    for part, about in stored.parts.items():
        whole = INT4_TENSORS[X + part]
        assert about == StoredArray(whole.shape, whole.dtype)
        np.testing.assert_array_equal(source.read(X + "weight", None, part), whole)
    assert source.stored(NORM).parts == {"weight": StoredArray((8,), np.dtype(np.float32))}
    with pytest.raises(CheckpointError, match=rf"tensor '{NORM}' is stored as weight: it has no part 'weight_packed'"):
        source.read(NORM, None, "weight_packed")


def test_experts_load_packed_each_device_its_part(tmp_path: Path) -> None:
    random, tensors = np.random.default_rng(2), {}
    for expert in range(4):
        tensors |= {
            f"{expert}.up.weight_packed": random.integers(-(2**31), 2**31, (16, 8), np.int64).astype(np.int32),
            f"{expert}.up.weight_scale": random.uniform(0, 1, (16, 2)).astype(ml_dtypes.bfloat16),
            f"{expert}.up.weight_shape": np.array([16, 64], np.int32),
        }
    source = SafetensorsSource(write(tmp_path, tensors, {"quantization_config": INT4}))
    parts = {"codes": "weight_packed", "scales": "weight_scale"}
    weights = WeightMap({path: Weight(("{expert}.up.weight",), part=part) for path, part in parts.items()})
    on = NamedSharding(Mesh(np.array(jax.devices())[:2], ("x",)), P("x"))
    targets = {
        "codes": jax.ShapeDtypeStruct((4, 16, 8), jnp.int32, sharding=on),
        "scales": jax.ShapeDtypeStruct((4, 16, 2), jnp.bfloat16, sharding=on),
    }
    for path, array in load(source, targets, weights).items():
        np.testing.assert_array_equal(array, np.stack([tensors[f"{expert}.up.{parts[path]}"] for expert in range(4)]))
    assert source.bytes_read == 4 * 16 * (8 * 4 + 2 * 2)
    wrong = WeightMap({"codes": Weight(("{expert}.up.weight",), part="weight_scale_inv")})
    with pytest.raises(CheckpointError, match=r"tensor '0\.up\.weight' is stored as INT4 32, which has no part 'weight_scale_inv'"):
        load(source, {"codes": targets["codes"]}, wrong)


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_the_declaration_may_be_a_multimodal_models_or_its_text_models(tmp_path: Path, place: str) -> None:
    config = {"quantization_config": INT4, "text_config": {}} if place == "top" else {"text_config": {"quantization_config": INT4}}
    source = SafetensorsSource(write(tmp_path, INT4_TENSORS, config))
    assert source.stored(X + "weight").format == INT4_GROUPS


def changed(declaration: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = inner = copy.deepcopy(declaration)
    *outer, last = path.split(".")
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return found


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"quant_method": "gptq", "bits": 8}, "bits is 8, not 4"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', not 'gptq'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv', not 'gemm'"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ("fp4", "quant_method is 'fp4'"),
        (changed(FP8, "weight_block_size", None), r"weight_block_size is None, not \[128, 128\]"),
        (changed(FP8, "weight_block_size", [64, 128]), r"weight_block_size is \[64, 128\], not \[128, 128\]"),
        (changed(FP8, "fmt", "e5m2"), "fmt is 'e5m2', not 'e4m3'"),
        (changed(FP8, "activation_scheme", "static"), "activation_scheme is 'static', not 'dynamic'"),
        (changed(INT4, "format", "nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized', not 'pack-quantized'"),
        (changed(INT4, f"{GROUP}.weights.num_bits", 8), rf"{GROUP}\.weights\.num_bits is 8, not 4"),
        (changed(INT4, f"{GROUP}.weights.type", "float"), rf"{GROUP}\.weights\.type is 'float', not 'int'"),
        (changed(INT4, f"{GROUP}.weights.strategy", "tensor"), rf"{GROUP}\.weights\.strategy is 'tensor', not 'group'"),
        (changed(INT4, f"{GROUP}.input_activations", {"num_bits": 8}), rf"{GROUP}\.input_activations is {{'num_bits': 8}}, not None"),
    ],
)
@pytest.mark.parametrize("place", ["quantization_config", "text_config.quantization_config"])
def test_another_quantisation_is_refused_by_its_field(tmp_path: Path, place: str, declaration: Any, message: str) -> None:
    config = (
        {"quantization_config": declaration} if place == "quantization_config" else {"text_config": {"quantization_config": declaration}}
    )
    write(tmp_path, FP8_TENSORS, config)
    with pytest.raises(
        CheckpointError, match=rf"config\.json: {place}\.{message}.*can be read; give the model's bf16 checkpoint or a GGUF"
    ):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("groups", [None, {}, {"group_0": 3}, {"group_0": {"weights": None}}])
def test_groups_that_are_none_are_refused(tmp_path: Path, groups: Any) -> None:
    write(tmp_path, INT4_TENSORS, {"quantization_config": changed(INT4, "config_groups", groups)})
    with pytest.raises(CheckpointError, match=r"quantization_config\.config_groups.* is .*fetch the checkpoint again"):
        SafetensorsSource(tmp_path)


def without(tensors: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors.items() if name != X + part}


@pytest.mark.parametrize(
    ("declaration", "tensors", "message"),
    [
        (FP8, without(FP8_TENSORS, "weight_scale_inv"), rf"tensor '{X}weight_scale_inv' is missing beside '{X}weight'"),
        (FP8, without(FP8_TENSORS, "weight"), rf"tensor '{X}weight' is missing beside '{X}weight_scale_inv'"),
        (INT4, without(INT4_TENSORS, "weight_scale"), rf"tensor '{X}weight_scale' is missing beside '{X}weight_packed'"),
        (INT4, without(INT4_TENSORS, "weight_shape"), rf"tensor '{X}weight_shape' is missing beside '{X}weight_packed'"),
        (INT4, {**INT4_TENSORS, X + "weight": np.ones((OUT, IN), np.float32)}, rf"tensor '{X}weight' is there packed too"),
        (
            FP8,
            {**FP8_TENSORS, X + "weight_scale_inv": np.ones((2, 4), np.float32)},
            rf"tensor '{X}weight_scale_inv' is F32 \[2, 4\], not F32 or BF16 \[3, 4\]",
        ),
        (
            INT4,
            {**INT4_TENSORS, X + "weight_shape": np.array([OUT, IN + 8], np.int32)},
            rf"tensor '{X}weight_packed' is I32 \[300, 56\], not I32 \[300, 57\] \('{X}weight_shape' is \[300, 456\]",
        ),
        (
            INT4,
            {**INT4_TENSORS, X + "weight_scale": np.ones((OUT - 1, IN // 32), ml_dtypes.bfloat16)},
            rf"tensor '{X}weight_scale' is BF16 \[299, 14\], not BF16 or F16 or F32 \[300, 14\]",
        ),
        (
            changed(INT4, f"{GROUP}.weights.symmetric", False),
            INT4_TENSORS,
            rf"tensor '{X}weight_zero_point' is missing beside '{X}weight_packed'",
        ),
        (
            changed(INT4, f"{GROUP}.weights.actorder", "group"),
            INT4_TENSORS,
            rf"tensor '{X}weight_g_idx' is missing beside '{X}weight_packed'",
        ),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_named(
    tmp_path: Path, declaration: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    write(tmp_path, tensors, {"quantization_config": declaration})
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.").replace(r"\\.", r"\.")) as caught:
        SafetensorsSource(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_codes_in_a_checkpoint_that_declares_nothing_are_refused_by_tensor(tmp_path: Path) -> None:
    write(tmp_path, FP8_TENSORS, {})
    source = SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match=f"tensor '{X}weight' has type F8_E4M3: F64, F32, F16, BF16 are supported"):
        source.read(X + "weight")
