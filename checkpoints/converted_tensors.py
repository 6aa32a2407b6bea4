"""What a conversion writes: the tensors of a source in their new types, read by rows so that at most a piece is in
memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from checkpoints.source import CheckpointError, TensorSource

DTYPES = {name: np.dtype(name) for name in ("float32", "float16")} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
_COUNTS = "iub"  # NumPy's kinds of integers and booleans, such as an old encoder's position_ids
_PIECE_BYTES = 2**26


@dataclass(frozen=True)
class ConvertedTensor:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    source: TensorSource
    part: str | None = None  # the part of it to read, for one that holds no weights

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Rows of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    def rows(self, start: int, stop: int) -> np.ndarray:
        """These rows, in C order. Raises `CheckpointError` for a value that the type can't represent."""
        index = (slice(start, stop), *[slice(None)] * (len(self.shape) - 1)) if self.shape else ()
        read = self.source.read(self.name, index, self.part)
        with np.errstate(over="ignore"):  # reported below
            values = np.asarray(read.astype(self.dtype, copy=False), order="C")
        if self.dtype == np.float16 and read.dtype != self.dtype and np.any(np.isinf(values) & ~np.isinf(read)):
            largest = np.abs(read.astype(np.float64)).max()
            raise CheckpointError(
                f"{self.source.path}: tensor {self.name!r} has a value of {largest:.6g}, which is beyond float16's {np.finfo(np.float16).max}: "
                "convert to bfloat16 or float32"
            )
        return values

    def pieces(self) -> Iterator[np.ndarray]:
        """All its rows, in order."""
        row_bytes = self.num_bytes // max(self.num_rows, 1)
        step = max(_PIECE_BYTES // max(row_bytes, 1), 1)
        for start in range(0, self.num_rows, step):
            yield self.rows(start, min(start + step, self.num_rows))


def converted_tensors(source: TensorSource, dtype: np.dtype | None) -> list[ConvertedTensor]:
    """Every tensor of the source: floating point ones in `dtype`, or in the source's type; integers unchanged."""
    found = []
    for name in source.names():
        shape = source.shape(name)
        (part, stored), *others = source.stored(name).parts.items()
        if not others and stored.shape == shape and stored.dtype.kind in _COUNTS:
            found.append(ConvertedTensor(name, shape, stored.dtype, source, part))
        else:
            given = source.read(name, (slice(0, 1),) * len(shape)).dtype
            found.append(ConvertedTensor(name, shape, given if dtype is None else dtype, source))
    return found
