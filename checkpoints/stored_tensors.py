"""Safetensors files' tensors as a model's: one that is stored unquantised, or several that are the codes and scales of
one, dequantised when read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from checkpoints.int4_tensors import LAYOUTS, PER_WORD, Int4Layout, Int4Matrix, Read
from checkpoints.quantisation import Quantisation
from checkpoints.safetensors_file import FileTensor
from checkpoints.source import FP8_BLOCKS, PLAIN, CheckpointError, Ranges, Stored, StoredArray, last_word

_BLOCK = 128  # values of each side of a block that share a scale
_SCALE, _SCALE_INV = "_scale", "_scale_inv"
_SHAPE = "weight_shape"
_OF_ACTIVATIONS = ("input_scale", "output_scale", "input_scale_ub")  # activations are not quantised here
_FP8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # by code


class StoredTensor(Protocol):
    """A tensor of the model: its `shape`, format and location."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str: ...

    @property
    def blocks(self) -> tuple[str, StoredArray] | None:
        """See `Stored`."""
        ...

    @property
    def parts(self) -> Mapping[str, FileTensor]: ...

    def values(self, name: str, read: Read, ranges: Ranges) -> np.ndarray:
        """What the ranges select; reads only what is needed for it. `name` is for messages."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTensor:
    parts: Mapping[str, FileTensor]
    blocks = None

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
class Fp8Matrix:
    """float8_e4m3fn with scales; as float32. A scale is of a tensor, of an output, or of 128 x 128, whichever its shape
    is of."""

    parts: Mapping[str, FileTensor]
    shape: tuple[int, ...]

    @property
    def format(self) -> str:
        return FP8_BLOCKS if self._is_of_blocks else "FP8 per output" if self._scale.shape else "FP8 per tensor"

    blocks = None

    @property
    def _scale(self) -> FileTensor:
        return list(self.parts.values())[1]

    @property
    def _is_of_blocks(self) -> bool:
        return list(self.parts)[1].endswith(_SCALE_INV)

    def values(self, name: str, read: Read, ranges: Ranges) -> np.ndarray:
        codes, scale = self.parts.values()
        values = _FP8[read(codes, ranges).view(np.uint8)]
        if self._is_of_blocks:
            scales = read(scale, [_cover(r, _BLOCK) for r in ranges]).astype(np.float32)
            for axis, of_axis in enumerate(ranges):
                scales = _repeat_scales(scales, of_axis, _BLOCK, axis)
        else:
            of_outputs = scale.shape[:1] == self.shape[:1] and self.shape[0] > 1
            scales = read(scale, [ranges[0] if of_outputs and not axis else (0, size) for axis, size in enumerate(scale.shape)])
            scales = scales.astype(np.float32).reshape(-1, 1)
        values *= scales
        return values


def _cover(within: tuple[int, int], size: int) -> tuple[int, int]:
    """The blocks of that size that overlap (start, stop)."""
    start, stop = within
    return start // size, -(-stop // size) if stop > start else start // size


def _repeat_scales(scales: np.ndarray, within: tuple[int, int], size: int, axis: int) -> np.ndarray:
    """The scale of each element within (start, stop) of an axis, from those of the blocks that it overlaps."""
    return np.take(scales, np.arange(*within) // size - within[0] // size, axis)


def model_tensors(tensors: Mapping[str, FileTensor], quantisation: Quantisation | None) -> dict[str, StoredTensor]:
    """By the model's names, such as "X.weight" for the three that an int4 matrix is stored as.

    Raises `CheckpointError` for parts that are missing or inconsistent.
    """
    if quantisation is None:
        return {name: PlainTensor({last_word(name): tensor}) for name, tensor in tensors.items()}
    if quantisation.method == "fp8":
        return _fp8_tensors(tensors)
    found: dict[str, StoredTensor] = {}
    layout = LAYOUTS[quantisation.method]
    words = {layout.codes, layout.scales, layout.zeros, layout.indices, _SHAPE} - {None}
    for name, tensor in tensors.items():
        module = name.removesuffix(last_word(name))
        if last_word(name) == layout.codes:
            if module + "weight" in tensors:
                raise CheckpointError(f"{tensor.file.path}: tensor {module + 'weight'!r} is there packed too; fetch the checkpoint again")
            found[module + "weight"] = _int4(module, name, tensors, layout, quantisation)
        elif not (last_word(name) in words and module + layout.codes in tensors):
            found[name] = PlainTensor({last_word(name): tensor})
    return found


def _fp8_tensors(tensors: Mapping[str, FileTensor]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        matrix = name.removesuffix(_SCALE_INV) if name.endswith(_SCALE_INV) else name.removesuffix(_SCALE)
        if matrix != name and matrix.endswith("weight"):
            _part(tensors, matrix, name)
        elif tensor.type == "F8_E4M3":
            found[name] = _fp8(name, tensor, tensors)
        elif last_word(name) not in _OF_ACTIVATIONS:
            found[name] = PlainTensor({last_word(name): tensor})
    return found


def stored(tensor: StoredTensor) -> Stored:
    parts = {part: StoredArray(of_file.shape, of_file.dtype) for part, of_file in tensor.parts.items()}
    return Stored(tensor.format, parts, tensor.blocks)


def _part(tensors: Mapping[str, FileTensor], name: str, beside: str) -> FileTensor:
    if name not in tensors:
        raise CheckpointError(f"{tensors[beside].file.path}: tensor {name!r} is missing beside {beside!r}; fetch the checkpoint again")
    return tensors[name]


def _fp8(name: str, codes: FileTensor, tensors: Mapping[str, FileTensor]) -> Fp8Matrix:
    if len(codes.shape) != 2:
        raise CheckpointError(f"{codes.file.path}: tensor {name!r} has shape {list(codes.shape)}: of fp8 matrices can be read")
    if name + _SCALE in tensors and name + _SCALE_INV not in tensors:
        scale, (rows, columns) = tensors[name + _SCALE], codes.shape
        shapes = [(), (1,), (1, 1), (rows,), (rows, 1)]
        _fit_one_of(name + _SCALE, scale, shapes, ("F32", "BF16"), f"{name!r} of {[rows, columns]}")
        return Fp8Matrix({last_word(name): codes, last_word(name) + _SCALE: scale}, codes.shape)
    scale = _part(tensors, name + _SCALE_INV, name)
    _fit(name + _SCALE_INV, scale, tuple(-(-size // _BLOCK) for size in codes.shape), ("F32", "BF16"), f"{name!r} of {list(codes.shape)}")
    return Fp8Matrix({last_word(name): codes, last_word(name) + _SCALE_INV: scale}, codes.shape)


def _int4(module: str, name: str, tensors: Mapping[str, FileTensor], layout: Int4Layout, quantisation: Quantisation) -> Int4Matrix:
    has_shape = layout.method == "compressed-tensors"
    needed = [layout.codes, layout.scales, *([_SHAPE] if has_shape else []), *([layout.zeros] if quantisation.has_zeros else [])]
    needed += [layout.indices] if quantisation.has_indices and layout.indices is not None else []
    parts = {part: _part(tensors, module + part, name) for part in needed}
    parts |= {part: tensors[module + part] for part in (layout.zeros, layout.indices) if part is not None and module + part in tensors}
    codes, scales = parts[layout.codes], parts[layout.scales]
    if has_shape:
        _fit(f"{module}{_SHAPE}", parts[_SHAPE], (2,), ("I32", "I64"), "it holds rows and columns")
        rows, columns = (int(size) for size in parts[_SHAPE].read([(0, 2)]))
        holds = f"'{module}{_SHAPE}' is {[rows, columns]}"
    else:
        stored = codes.shape if len(codes.shape) == 2 else (0, 0)
        rows, columns = (stored[1], stored[0] * PER_WORD) if layout.packs_inputs else (stored[1] * PER_WORD, stored[0])
        holds = f"{name!r} of {list(codes.shape)}"
    num_groups = (scales.shape[1 if layout.is_outputs_first else 0] if len(scales.shape) == 2 else 0) or 1
    group = -(-columns // num_groups)
    group = next((size for size in (32, 64, 128, 256, 512, 1024) if -(-columns // size) == num_groups), group)

    def oriented(outputs: int, inputs: int) -> tuple[int, int]:
        return (outputs, inputs) if layout.is_outputs_first else (inputs, outputs)

    packed = (rows, -(-columns // PER_WORD)) if layout.packs_inputs else (-(-rows // PER_WORD), columns)
    _fit(name, codes, oriented(*packed), ("I32",), holds)
    _fit(f"{module}{layout.scales}", scales, oriented(rows, num_groups), ("BF16", "F16", "F32"), holds)
    if (zeros := parts.get(layout.zeros)) is not None:
        _fit(f"{module}{layout.zeros}", zeros, oriented(-(-rows // PER_WORD), num_groups), ("I32",), holds)
    if layout.indices is not None and (indices := parts.get(layout.indices)) is not None:
        _fit(f"{module}{layout.indices}", indices, (columns,), ("I32", "I64"), holds)
        if np.array_equal(indices.read([(0, columns)]), np.arange(columns) // group):
            del parts[layout.indices]  # in order after all
    return Int4Matrix(layout, parts, (rows, columns), group, quantisation.zero_added)


def _fit_one_of(name: str, tensor: FileTensor, shapes: list[tuple[int, ...]], types: tuple[str, ...], reason: str) -> None:
    _fit(name, tensor, tensor.shape if tensor.shape in shapes else shapes[-1], types, reason)


def _fit(name: str, tensor: FileTensor, shape: tuple[int, ...], types: tuple[str, ...], reason: str) -> None:
    if tensor.shape != shape or tensor.type not in types:
        raise CheckpointError(
            f"{tensor.file.path}: tensor {name!r} is {tensor.type} {list(tensor.shape)}, not {' or '.join(types)} {list(shape)} "
            f"({reason}); fetch the checkpoint again"
        )
