"""GGUF files of any architecture, and what their blocks hold: written out value by value from the formats' descriptions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    raw: Mapping[str, tuple[Type, np.ndarray]] | None = None,
    split: tuple[int, int, int] | None = None,
) -> None:
    """`metadata` without the architecture's name; `raw`: tensors given as their bytes [rows, bytes of a row]; `split`: number, count and
    tensors of all parts, for one part of a file of which this is not the first unless it is 0."""
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[2])
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    for name, (type_, blocks) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def base(**changes: Any) -> dict[str, Any]:
    """Metadata that every architecture has, of a model of two layers, 4 heads and 2 KV heads of 16 in a hidden size of 64."""
    found = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        **changes,
    }
    return {key: value for key, value in found.items() if value is not None}


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def _q4_0(block: bytes) -> list[float]:
    """A scale, then 16 bytes: their low halves are values 0 to 15, their high ones 16 to 31; 8 was added."""
    codes = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [half(block, 0) * (code - 8) for code in codes]


def _q4_1(block: bytes) -> list[float]:
    """A scale and a least value; codes as in Q4_0."""
    codes = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [half(block, 0) * code + half(block, 2) for code in codes]


def _q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * code for code in struct.unpack_from("<32b", block, 2)]


def _scale_and_least(packed: bytes, group: int) -> tuple[int, int]:
    """Of the eight groups of a K-quant, 6 bits each in 12 bytes: the first four's in the low 6 bits of bytes 0 to 3 and 4 to 7; of the
    others' 4 bits in the halves of bytes 8 to 11 and 2 in the top of those bytes."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low = packed[group + 4]
    return (low & 15) | (packed[group - 4] >> 6) << 4, (low >> 4) | (packed[group] >> 6) << 4


def _q4_k(block: bytes) -> list[float]:
    """Scales of scales and of least values, 12 bytes of those, 128 of codes: 32 bytes' low halves are one group, their high ones the next."""
    values = []
    for group in range(8):
        scale, least = _scale_and_least(block[4:16], group)
        for place in range(32):
            code = block[16 + group // 2 * 32 + place] >> 4 * (group % 2) & 15
            values.append(half(block, 0) * scale * code - half(block, 2) * least)
    return values


def _q5_k(block: bytes) -> list[float]:
    """As Q4_K; bit `group` of each of 32 more bytes is the fifth of that group's codes."""
    values = []
    for group in range(8):
        scale, least = _scale_and_least(block[4:16], group)
        for place in range(32):
            code = (block[48 + group // 2 * 32 + place] >> 4 * (group % 2) & 15) | (block[16 + place] >> group & 1) << 4
            values.append(half(block, 0) * scale * code - half(block, 2) * least)
    return values


def _q6_k(block: bytes) -> list[float]:
    """128 bytes of low halves, 64 of the two bits above, 16 signed scales, their scale. Of each half of the block: four runs of 32, the
    low bits of the first two in the low halves of 64 bytes, of the others in the high ones; two bits a run in 32 bytes."""
    values = [0.0] * 256
    for part in range(2):
        for run in range(4):
            for place in range(32):
                low = block[64 * part + 32 * (run % 2) + place] >> 4 * (run // 2) & 15
                high = block[128 + 32 * part + place] >> 2 * run & 3
                at = 128 * part + 32 * run + place
                (scale,) = struct.unpack_from("<b", block, 192 + at // 16)
                values[at] = half(block, 208) * scale * ((low | high << 4) - 32)
    return values


# Of each type: values and bytes of a block, where its 16-bit floats lie, and what it holds.
BLOCKS: dict[Type, tuple[int, int, tuple[int, ...], Callable[[bytes], list[float]]]] = {
    Type.Q4_0: (32, 18, (0,), _q4_0),
    Type.Q4_1: (32, 20, (0, 2), _q4_1),
    Type.Q8_0: (32, 34, (0,), _q8_0),
    Type.Q4_K: (256, 144, (0, 2), _q4_k),
    Type.Q5_K: (256, 176, (0, 2), _q5_k),
    Type.Q6_K: (256, 210, (208,), _q6_k),
    Type.F32: (1, 4, (), lambda block: [struct.unpack("<f", block)[0]]),
    Type.F16: (1, 2, (), lambda block: [half(block, 0)]),
    Type.BF16: (1, 2, (), lambda block: [struct.unpack("<f", b"\0\0" + block)[0]]),
}


def random_rows(type_: Type, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [rows, bytes of a row] at random, and the values that they are."""
    size, num_bytes, halves, values_of = BLOCKS[type_]
    random = np.random.default_rng(seed)
    if size == 1:
        dtype = {Type.F32: np.float32, Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}[type_]
        stored = random.standard_normal((rows, columns)).astype(dtype).view(np.uint8).reshape(rows, columns, num_bytes)
    else:
        stored = random.integers(0, 256, (rows, columns // size, num_bytes), np.uint8)
        for at in halves:
            scale = random.uniform(-2, 2, stored.shape[:2]).astype(np.float16)
            stored[..., at : at + 2] = scale.view(np.uint8).reshape(*scale.shape, 2)
    values = [[value for block in row for value in values_of(block.tobytes())] for row in stored]
    return stored.reshape(rows, -1), np.array(values, np.float32)
