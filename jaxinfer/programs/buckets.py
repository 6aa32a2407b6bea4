"""Buckets: the padded sizes that programs are compiled for. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Each tile of packed prefill tokens belongs to one request, so requests start at multiples of it.
QUERY_TILE = 32
_MAX_PREFILL_ROWS = 8  # requests packed into one prefill step; each costs a row of logits


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket of at least `size`. `buckets` are ascending; the scheduler never exceeds the last."""
    return next(bucket for bucket in buckets if bucket >= size)


def query_tile(num_tokens: int) -> int:
    """The tile of a prefill program of this many tokens."""
    return math.gcd(num_tokens, QUERY_TILE)


def prefill_rows(num_tokens: int) -> int:
    """The most requests that a prefill program of this many tokens takes."""
    return max(1, min(num_tokens // QUERY_TILE, _MAX_PREFILL_ROWS))
