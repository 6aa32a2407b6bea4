"""TensorSource: what a checkpoint file or folder is to the rest: a configuration, and named tensors read by slices."""

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

PLAIN = ("F64", "F32", "F16", "BF16")  # formats that hold weights as they are
FP8_BLOCKS = "FP8 128x128"  # float8_e4m3fn with a scale for every 128 x 128, as DeepSeek-V3 has it
INT4_GROUPS = "INT4 32"  # integers of 4 bits with a scale for 32 of a row, as compressed-tensors' pack-quantized (Kimi K2.x) has them
BY_HAND = "give the model's bf16 checkpoint or a GGUF file of it"


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of those that a tensor is stored as."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor lies in its file. `format`: F64, F32, F16 or BF16 where its values lie as they are; else FP8_BLOCKS, INT4_GROUPS or the
    name of a GGUF type such as Q4_K. `parts` by the last word of their names: one called as the tensor's own, such as "weight"; of
    FP8_BLOCKS beside it "weight_scale_inv"; of INT4_GROUPS "weight_packed", "weight_scale" and "weight_shape". The part of a quantised
    GGUF tensor has the bytes of its blocks, uint8 [..., blocks of a row, bytes of a block]."""

    format: str
    parts: Mapping[str, StoredArray]

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
        """Raises `CheckpointError` for a name that is not there."""
        ...

    def read(self, name: str, index: Index | None = None, part: str | None = None) -> np.ndarray:
        """The tensor, or the part of it that `index` (one unit-step slice per dimension) selects, as an array of its own.

        Floating point: as stored where NumPy (with ml_dtypes) has the type; where it was quantised float32, or of the type of an integer's
        scale. Only what `index` calls for is read. With `part`, that one of its `stored` parts instead, as it lies in the file, of which
        `index` then selects. Raises `CheckpointError` for a name or part that is not there.
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
    """Of a tensor's name, which its only part is called by: 'weight'."""
    return name.rpartition(".")[2]
