"""One safetensors file: its tensors' types, shapes and bytes, by a memory map.

The `safetensors` package checks the header. Its NumPy slices have no 8-bit floats, so bytes are read here. Layout:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.aligned import aligned_empty
from checkpoints.source import CheckpointError, Ranges

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(bool),
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    file: SafetensorsFile
    type: str  # safetensors' name, such as BF16
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the start of the file

    @property
    def dtype(self) -> np.dtype:
        """Raises `CheckpointError` for a type without a NumPy equivalent."""
        if self.type not in _DTYPES:
            raise CheckpointError(f"{self.file.path}: holds tensors of type {self.type}, which can't be read: {', '.join(_DTYPES)} can")
        return _DTYPES[self.type]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, ranges: Ranges) -> np.ndarray:
        """A copy of what these (start, stop) of each dimension select."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        if ranges and all(cut == (0, size) for cut, size in zip(ranges[1:], self.shape[1:], strict=True)):
            (first, last) = ranges[0]
            rows = self.file.read(self.offset + first * row_bytes, max(last - first, 0) * row_bytes)
            return (
                rows.view(self.dtype).reshape(-1, *self.shape[1:]) if row_bytes else np.empty((last - first, *self.shape[1:]), self.dtype)
            )
        stored = self.file.data[self.offset : self.offset + self.num_bytes]
        return np.array(stored.view(self.dtype).reshape(self.shape)[tuple(slice(*r) for r in ranges)])


class SafetensorsFile:
    """Raises `CheckpointError` for a file that is missing, truncated or corrupt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            safe_open(path, framework="numpy")
            self._file = path.open("rb")
            self.data = np.frombuffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing, though the index names it; fetch the checkpoint again") from None
        except (SafetensorError, OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            why = _where_it_ends(path) or error
            raise CheckpointError(f"{path}: truncated or corrupt safetensors file ({why}); fetch it again") from error
        start = 8 + int.from_bytes(self.data[:8].tobytes(), "little")
        header = json.loads(self.data[8:start].tobytes())
        self.metadata: dict[str, str] = header.get("__metadata__", {})
        self.tensors = {
            name: FileTensor(self, about["dtype"], tuple(about["shape"]), start + about["data_offsets"][0])
            for name, about in header.items()
            if name != "__metadata__"
        }

    def read(self, offset: int, size: int) -> np.ndarray:
        """A copy of these bytes, uint8. What is read so is not mapped: it takes no memory of this process beside the
        copy. Raises `CheckpointError` if the file has become shorter."""
        found, done = aligned_empty((size,), np.dtype(np.uint8)), 0
        while done < size:
            count = os.preadv(self._file.fileno(), [found.data[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.path}: became shorter while it was read")
            done += count
        return found


def _where_it_ends(path: Path) -> str | None:
    """For a file that ends too early, in which tensor; None where that is unknown."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8)) if start <= size else {}
        ends = {name: start + int(about["data_offsets"][1]) for name, about in header.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    cut = min((name for name, end in ends.items() if end > size), key=ends.__getitem__, default=None)
    return None if cut is None else f"tensor {cut!r} ends at byte {ends[cut]}, the file at {size}"
