"""The place of the largest value, by plain reductions: XLA on CPU does not vectorise its own argmax.

Over runs of lanes first, so that one pass reads all values. Of equal values the first counts.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_LANES = 128


def argmax_of_rows(x: Float[Array, "B X"]) -> Int[Array, " B"]:
    """For each row, the place of its largest value."""
    batch, size = x.shape
    if size % _LANES:
        return _first_of_largest(x, axis=1)
    runs = x.reshape(batch, size // _LANES, _LANES)
    run = _first_of_largest(runs.max(axis=2), axis=1)
    return run * _LANES + _first_of_largest(jnp.take_along_axis(runs, run[:, None, None], axis=1)[:, 0], axis=1)


def argmax_of_columns(x: Float[Array, "X B"]) -> Int[Array, " B"]:
    """For each column, the place of its largest value."""
    size, batch = x.shape
    if size % _LANES:
        return _first_of_largest(x, axis=0)
    runs = x.reshape(size // _LANES, _LANES, batch)
    run = _first_of_largest(runs.max(axis=1), axis=0)
    return run * _LANES + _first_of_largest(jnp.take_along_axis(runs, run[None, None, :], axis=0)[0], axis=0)


def _first_of_largest(x: Float[Array, "A C"], axis: int) -> Int[Array, " B"]:
    size = x.shape[axis]
    place = jnp.expand_dims(jnp.arange(size, dtype=jnp.int32), 1 - axis)
    return jnp.min(jnp.where(x == jnp.max(x, axis=axis, keepdims=True), place, size - 1), axis=axis)
