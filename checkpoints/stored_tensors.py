"""Safetensors files' tensors as a model's: one that is stored unquantised, or several that are the codes and scales of
one, dequantised when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from checkpoints.safetensors_file import FileTensor
from checkpoints.source import FP8_BLOCKS, INT4_GROUPS, PLAIN, CheckpointError, Ranges, Stored, StoredArray, last_word

_BLOCK, _GROUP = 128, 32  # values that share a scale: of each side of a block, of a row
_PER_WORD = 8  # codes of 4 bits
_SCALE_INV = "_scale_inv"
_INT4_PARTS = ("weight_packed", "weight_scale", "weight_shape")
_FP8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # by code
# the two of a byte, without the 8 that was added to each
_INT4 = np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1).astype(np.float32) - 8

Read = Callable[[FileTensor, Ranges], np.ndarray]


class StoredTensor(Protocol):
    """A tensor of the model: its `shape`, format and location."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str: ...

    @property
    def parts(self) -> Mapping[str, FileTensor]: ...

    def values(self, name: str, read: Read, ranges: Ranges) -> np.ndarray:
        """What the ranges select; reads only what is needed for it. `name` is for messages."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTensor:
    parts: Mapping[str, FileTensor]

    @property
    def _tensor(self) -> FileTensor:
        (tensor,) = self.parts.values()
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    @property
    def format(self) -> str:
        return self._tensor.type

    def values(self, name: str, read: Read, ranges: Ranges) -> np.ndarray:
        if self.format not in PLAIN:
            raise CheckpointError(f"{self._tensor.file.path}: tensor {name!r} has type {self.format}: {', '.join(PLAIN)} are supported")
        return read(self._tensor, ranges)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """float8_e4m3fn with a scale for each 128 x 128; as float32."""

    parts: Mapping[str, FileTensor]
    shape: tuple[int, ...]
    format = FP8_BLOCKS

    def values(self, name: str, read: Read, ranges: Ranges) -> np.ndarray:
        codes, scale = self.parts.values()
        values = _FP8[read(codes, ranges).view(np.uint8)]
        scales = read(scale, [_cover(r, _BLOCK) for r in ranges]).astype(np.float32)
        for axis, of_axis in enumerate(ranges):
            scales = _repeat_scales(scales, of_axis, _BLOCK, axis)
        values *= scales
        return values


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """Integers of 4 bits, eight in a word with the first lowest, with a scale for 32 of a row; of the scales' type."""

    parts: Mapping[str, FileTensor]
    shape: tuple[int, ...]
    format = INT4_GROUPS

    def values(self, name: str, read: Read, ranges: Ranges) -> np.ndarray:
        packed, scale, _ = self.parts.values()
        rows, columns = ranges
        words = read(packed, [rows, _cover(columns, _PER_WORD)])
        first = columns[0] // _PER_WORD * _PER_WORD
        codes = np.take(_INT4, words.astype("<i4", copy=False).view(np.uint8), 0).reshape(len(words), -1)
        values = codes[:, columns[0] - first : columns[1] - first]
        scales = read(scale, [rows, _cover(columns, _GROUP)])
        values *= _repeat_scales(scales.astype(np.float32), columns, _GROUP, 1)
        return values.astype(scales.dtype)  # a product is rounded as it was during training or tuning


def _cover(within: tuple[int, int], size: int) -> tuple[int, int]:
    """The blocks of that size that overlap (start, stop)."""
    start, stop = within
    return start // size, -(-stop // size) if stop > start else start // size


def _repeat_scales(scales: np.ndarray, within: tuple[int, int], size: int, axis: int) -> np.ndarray:
    """The scale of each element within (start, stop) of an axis, from those of the blocks that it overlaps."""
    return np.take(scales, np.arange(*within) // size - within[0] // size, axis)


def model_tensors(tensors: Mapping[str, FileTensor], quantisation: str | None) -> dict[str, StoredTensor]:
    """By the model's names, such as "X.weight" for the three that an int4 matrix is stored as.

    Raises `CheckpointError` for parts that are missing or inconsistent.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if quantisation == FP8_BLOCKS and name.endswith(_SCALE_INV):
            _part(tensors, name.removesuffix(_SCALE_INV), name)
        elif quantisation == FP8_BLOCKS and tensor.type == "F8_E4M3":
            found[name] = _fp8(name, tensor, _part(tensors, name + _SCALE_INV, name))
        elif quantisation == INT4_GROUPS and name.endswith(".weight_packed"):
            module = name.removesuffix("weight_packed")
            if module + "weight" in tensors:
                raise CheckpointError(f"{tensor.file.path}: tensor {module + 'weight'!r} is there packed too; fetch the checkpoint again")
            found[module + "weight"] = _int4(module, {part: _part(tensors, module + part, name) for part in _INT4_PARTS})
        elif not (quantisation == INT4_GROUPS and name.endswith(_INT4_PARTS) and name.rpartition(".")[0] + ".weight_packed" in tensors):
            found[name] = PlainTensor({last_word(name): tensor})
    return found


def stored(tensor: StoredTensor) -> Stored:
    return Stored(tensor.format, {part: StoredArray(of_file.shape, of_file.dtype) for part, of_file in tensor.parts.items()})


def _part(tensors: Mapping[str, FileTensor], name: str, beside: str) -> FileTensor:
    if name not in tensors:
        raise CheckpointError(f"{tensors[beside].file.path}: tensor {name!r} is missing beside {beside!r}; fetch the checkpoint again")
    return tensors[name]


def _fp8(name: str, codes: FileTensor, scale: FileTensor) -> Fp8Blocks:
    if len(codes.shape) != 2:
        raise CheckpointError(f"{codes.file.path}: tensor {name!r} has shape {list(codes.shape)}: of fp8 matrices can be read")
    _fit(name + _SCALE_INV, scale, tuple(-(-size // _BLOCK) for size in codes.shape), ("F32", "BF16"), f"{name!r} of {list(codes.shape)}")
    return Fp8Blocks({last_word(name): codes, last_word(name) + _SCALE_INV: scale}, codes.shape)


def _int4(module: str, parts: Mapping[str, FileTensor]) -> Int4Groups:
    packed, scale, of_shape = parts.values()
    _fit(f"{module}weight_shape", of_shape, (2,), ("I32", "I64"), "it holds rows and columns")
    rows, columns = (int(size) for size in of_shape.read([(0, 2)]))
    holds = f"'{module}weight_shape' is {[rows, columns]}"
    _fit(f"{module}weight_packed", packed, (rows, -(-columns // _PER_WORD)), ("I32",), holds)
    _fit(f"{module}weight_scale", scale, (rows, -(-columns // _GROUP)), ("BF16", "F16", "F32"), holds)
    return Int4Groups(parts, (rows, columns))


def _fit(name: str, tensor: FileTensor, shape: tuple[int, ...], types: tuple[str, ...], reason: str) -> None:
    if tensor.shape != shape or tensor.type not in types:
        raise CheckpointError(
            f"{tensor.file.path}: tensor {name!r} is {tensor.type} {list(tensor.shape)}, not {' or '.join(types)} {list(shape)} "
            f"({reason}); fetch the checkpoint again"
        )
