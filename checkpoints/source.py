"""TensorSource, the interface of a checkpoint file or folder: a configuration, and named tensors read by slices."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from checkpoints.errors import CheckpointError as CheckpointError

Index = tuple[slice, ...]
Ranges = list[tuple[int, int]]  # (start, stop) of each dimension

PLAIN = ("F64", "F32", "F16", "BF16")  # formats that store weights unquantised
FP8_BLOCKS = "FP8 128x128"  # float8_e4m3fn with a scale for every 128 x 128, as in DeepSeek-V3
# integers of 4 bits with a scale for 32 of a row, as in compressed-tensors' pack-quantized (Kimi K2.x)
INT4_GROUPS = "INT4 32"
BLOCKS = "blocks"  # the part that a tensor is read as in blocks that its file hasn't
BY_HAND = "give the model's bf16 checkpoint or a GGUF file of it"


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One of the arrays that a tensor is stored as."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor is stored in its file. `format`: F64, F32, F16 or BF16 where its values are unquantised; else
    FP8_BLOCKS, INT4_GROUPS or the name of a GGUF type such as Q4_K. `parts` by the last word of their names: one has
    the tensor's own, such as "weight". FP8_BLOCKS also has "weight_scale_inv"; INT4_GROUPS has "weight_packed",
    "weight_scale" and "weight_shape". The part of a quantised GGUF tensor has the bytes of its blocks, uint8 [...,
    blocks of a row, bytes of a block]."""

    format: str
    parts: Mapping[str, StoredArray]
    # The type of blocks that `read` can give it in as its part BLOCKS, and their array; None if it can't.
    blocks: tuple[str, StoredArray] | None = None

    def shape_of(self, part: str) -> tuple[int, ...] | None:
        """Of a part, or of BLOCKS; None for a part that it has not."""
        if part == BLOCKS:
            return None if self.blocks is None else self.blocks[1].shape
        return self.parts[part].shape if part in self.parts else None

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())


class TensorSource(Protocol):
    """One checkpoint, open for reading. Names, shapes and configuration are Hugging Face's whatever the format, with
    weights as [out, in] and the query and key rows in the order that "rotate half" RoPE expects. Thread safe."""

    path: Path
    config: dict[str, Any]  # the keys of Hugging Face's config.json

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from the file so far, as stored (before dequantising)."""
        ...

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored(self, name: str) -> Stored:
        """Raises `CheckpointError` for an unknown name."""
        ...

    def read(self, name: str, index: Index | None = None, part: str | None = None) -> np.ndarray:
        """The tensor, or the part of it that `index` (one unit-step slice per dimension) selects, as an array of its
        own.

        Floating point: the stored type where NumPy (with ml_dtypes) has it; float32 where it was quantised, or the type
        of an integer's scale. Only what `index` selects is read. With `part`, that one of its `stored` parts instead,
        as stored in the file, of which `index` then selects. Raises `CheckpointError` for an unknown name or part.
        """
        ...


class ByteCounter:
    """A sum that several threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count


def bounds(index: Index | None, shape: tuple[int, ...]) -> Ranges:
    """(start, stop) of every dimension that `index` selects from `shape`."""
    if index is None:
        return [(0, size) for size in shape]
    assert len(index) == len(shape), (index, shape)
    ranges = [s.indices(size) for s, size in zip(index, shape, strict=True)]
    assert all(step == 1 for _, _, step in ranges), index
    return [(start, max(start, stop)) for start, stop, _ in ranges]


def last_word(name: str) -> str:
    """The last word of a tensor's name, which is the name of its only part: 'weight'."""
    return name.rpartition(".")[2]
