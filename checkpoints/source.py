"""TensorSource: what a checkpoint file or folder is to the rest: a configuration, and named tensors read by slices."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Index = tuple[slice, ...]


class CheckpointError(ValueError):
    """A checkpoint that can't be loaded; the message names the file or tensor, what is wrong with it and what to do."""


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

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """The tensor, or the part of it that `index` (one unit-step slice per dimension) selects, as an array of its own.

        Floating point: as stored where NumPy (with ml_dtypes) has the type, float32 where it was quantised. Only the part's
        bytes are read. Raises `CheckpointError` for a name that is not there.
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


def bounds(index: Index | None, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, stop) of every dimension that `index` selects from `shape`."""
    if index is None:
        return [(0, size) for size in shape]
    assert len(index) == len(shape), (index, shape)
    ranges = [s.indices(size) for s, size in zip(index, shape, strict=True)]
    assert all(step == 1 for _, _, step in ranges), index
    return [(start, max(start, stop)) for start, stop, _ in ranges]
