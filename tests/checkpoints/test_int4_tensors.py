"""Integers of 4 bits in groups as compressed-tensors, GPTQ and AWQ store them, and fp8 with a scale a tensor or an output: values by each
format's description, one by one; slices; blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import BLOCKS, CheckpointError
from pallas_kernels.block_matmul.block_types import BLOCK_TYPES, read_blocks, values_of

X, OUT, IN = "model.layers.0.mlp.up_proj.", 48, 256
RANDOM = np.random.default_rng(5)
CODES = RANDOM.integers(0, 16, (OUT, IN))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the value whose bits are at a place of a word


def words(values: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Values of 4 bits in words of eight along an axis, the first lowest."""
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for place, value in enumerate(order):
        packed |= moved[..., value::8] << np.uint32(4 * place)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def made(method: str, group: int, *, has_zeros: bool, is_permuted: bool = False, scale: Any = np.float16, zero_added: int = 1):
    """A declaration, tensors and the values."""
    num_groups = IN // group
    scales = RANDOM.uniform(1e-3, 1, (OUT, num_groups)).astype(scale)
    zeros = RANDOM.integers(0, 16, (OUT, num_groups)) if has_zeros else np.full((OUT, num_groups), 8)
    indices = np.arange(IN) // group
    if is_permuted:
        indices = RANDOM.permutation(indices)
    values = np.empty((OUT, IN), scale)
    for row in range(OUT):
        for column in range(IN):
            of_group = indices[column]
            values[row, column] = (CODES[row, column] - zeros[row, of_group]) * float(scales[row, of_group])
    if method == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": not has_zeros}
        weights["actorder"] = "group" if is_permuted else None
        declared = {"quant_method": method, "format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
        tensors = {"weight_packed": words(CODES, 1), "weight_scale": scales, "weight_shape": np.array([OUT, IN], np.int64)}
        tensors |= {"weight_zero_point": words(zeros, 0)} if has_zeros else {}
        tensors |= {"weight_g_idx": indices.astype(np.int32)} if is_permuted else {}
    elif method == "gptq":
        declared = {"quant_method": method, "bits": 4, "group_size": group, "desc_act": is_permuted}
        declared |= {"checkpoint_format": "gptq_v2"} if not zero_added else {}
        stored = zeros - zero_added & 15
        tensors = {"qweight": words(CODES.T, 0), "qzeros": words(stored.T, 1), "scales": scales.T, "g_idx": indices.astype(np.int32)}
    else:
        declared = {"quant_method": method, "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        tensors = {"qweight": words(CODES.T, 1, AWQ_ORDER), "qzeros": words(zeros.T, 1, AWQ_ORDER), "scales": scales.T}
    named = {X + name: np.ascontiguousarray(array) for name, array in tensors.items()} | {X + "bias": np.ones(OUT, np.float32)}
    return {"quantization_config": declared}, named, values


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> SafetensorsSource:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


CASES = {
    "compressed-tensors 128": (("compressed-tensors", 128), {"has_zeros": False}, "INT4 128", "INT4 F16"),
    "compressed-tensors 32 with zeros": (
        ("compressed-tensors", 32),
        {"has_zeros": True, "scale": ml_dtypes.bfloat16},
        "INT4 32",
        "INT4 zero 32 BF16",
    ),
    "compressed-tensors, a scale an output": (("compressed-tensors", 256), {"has_zeros": False}, "INT4 256", None),
    "compressed-tensors in another order": (
        ("compressed-tensors", 64),
        {"has_zeros": True, "is_permuted": True},
        "INT4 64 act-order",
        None,
    ),
    "GPTQ": (("gptq", 128), {"has_zeros": True}, "GPTQ 128", "INT4 zero 128 F16"),
    "GPTQ of the second format": (("gptq", 64), {"has_zeros": True, "zero_added": 0}, "GPTQ 64", "INT4 zero 64 F16"),
    "GPTQ in another order": (("gptq", 32), {"has_zeros": False, "is_permuted": True}, "GPTQ 32 act-order", None),
    "AWQ": (("awq", 128), {"has_zeros": True}, "AWQ 128", "INT4 zero 128 F16"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_slices_and_blocks(tmp_path: Path, case: str) -> None:
    arguments, options, name, blocks = CASES[case]
    config, tensors, values = made(*arguments, **options)
    source = write(tmp_path, config, tensors)
    assert set(source.names()) == {X + "weight", X + "bias"}
    stored = source.stored(X + "weight")
    assert stored.format == name and source.shape(X + "weight") == (OUT, IN)
    read = source.read(X + "weight")
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    for top, bottom, left, right in ((0, 48, 5, 6), (3, 21, 31, 130), (47, 48, 250, 256), (8, 16, 64, 128), (5, 5, 0, 8)):
        part = source.read(X + "weight", (slice(top, bottom), slice(left, right)))
        np.testing.assert_array_equal(part, values[top:bottom, left:right])
    assert (stored.blocks and stored.blocks[0]) == blocks
    if blocks is None:
        with pytest.raises(CheckpointError, match="has no part"):
            source.read(X + "weight", None, BLOCKS)
        return
    kind, whole = BLOCK_TYPES[blocks], source.read(X + "weight", None, BLOCKS)
    assert whole.shape == stored.blocks[1].shape == (OUT, IN // kind.size, kind.num_bytes)
    found = np.asarray(values_of(kind, read_blocks(kind, jnp.asarray(whole)))).reshape(OUT, IN)
    np.testing.assert_array_equal(found.astype(values.dtype), values)
    part = source.read(X + "weight", (slice(9, 30), slice(1, 2), slice(0, kind.num_bytes)), BLOCKS)
    np.testing.assert_array_equal(part, whole[9:30, 1:2])


def test_indices_of_groups_that_are_not_there_are_refused(tmp_path: Path) -> None:
    config, tensors, _ = made("gptq", 32, has_zeros=True, is_permuted=True)
    tensors[X + "g_idx"][7] = 99
    with pytest.raises(CheckpointError, match="groups that aren't there"):
        write(tmp_path, config, tensors).read(X + "weight")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_parts_that_do_not_fit_are_named(tmp_path: Path, part: str) -> None:
    config, tensors, _ = made("gptq", 64, has_zeros=True, is_permuted=True)
    tensors[X + part] = tensors[X + part][:-1]
    with pytest.raises(CheckpointError, match=r"tensor .*; fetch the checkpoint again"):
        write(tmp_path, config, tensors)


FLOAT_GROUP = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"weights": FLOAT_GROUP}}}


@pytest.mark.parametrize("shape", [(), (1,), (OUT, 1), (OUT,)])
@pytest.mark.parametrize("declared", [FLOAT, {"quant_method": "fbgemm_fp8"}], ids=["compressed-tensors", "fbgemm"])
def test_fp8_with_a_scale_a_tensor_or_an_output(tmp_path: Path, declared: dict[str, Any], shape: tuple[int, ...]) -> None:
    codes = RANDOM.standard_normal((OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    scale = RANDOM.uniform(0.1, 2, shape).astype(np.float32)
    tensors = {X + "weight": codes, X + "weight_scale": np.asarray(scale), X + "input_scale": np.ones(1, np.float32)}
    source = write(tmp_path, {"quantization_config": declared}, tensors)
    assert source.names() == [X + "weight"]
    assert source.stored(X + "weight").format == (
        "FP8 per output" if shape and shape[0] == OUT else "FP8 per tensor" if not shape else "FP8 per output"
    )
    wanted = codes.astype(np.float32) * (scale.reshape(-1, 1) if shape else scale)
    np.testing.assert_array_equal(source.read(X + "weight"), wanted)
    np.testing.assert_array_equal(source.read(X + "weight", (slice(3, 9), slice(5, 70))), wanted[3:9, 5:70])


def test_fp8_in_blocks_of_compressed_tensors_is_refused_by_its_field(tmp_path: Path) -> None:
    weights = FLOAT_GROUP | {"strategy": "block"}
    declared = FLOAT | {"config_groups": {"g": {"weights": weights}}}
    with pytest.raises(CheckpointError, match="strategy is 'block', not 'tensor'"):
        write(tmp_path, {"quantization_config": declared}, {X + "weight": np.ones((OUT, IN), np.float32)})
