"""Host arrays that a CPU device takes as they are: JAX copies those that don't begin at a multiple of 64 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

_ALIGNMENT = 64


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array of any contents."""
    num_bytes = prod(shape) * dtype.itemsize
    room = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + num_bytes].view(dtype).reshape(shape)
