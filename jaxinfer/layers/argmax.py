"""Argmax by plain reductions: XLA on CPU does not vectorise its own.

Blocks of lanes are reduced first, so that one pass reads all values. Ties go to the first. Where values are split over
devices, each finds its own maximum, and these are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.layers.vocabulary import VocabShard, shard_over_vocab

_LANES = 128


def argmax_of_rows(x: Float[Array, "B X"]) -> Int[Array, " B"]:
    """For each row, the index of its largest value."""
    return shard_over_vocab(argmax_over_shards, x, 1, x)


def argmax_of_columns(x: Float[Array, "X B"]) -> Int[Array, " B"]:
    """For each column, the index of its largest value."""

    def on_shard(shard: VocabShard, x: Float[Array, "X B"]) -> Int[Array, " B"]:
        return _largest_of_parts(shard, len(x), _of_columns(x), lambda: x.max(axis=0))

    return shard_over_vocab(on_shard, x, 0, x)


def argmax_over_shards(shard: VocabShard, x: Float[Array, "B X"]) -> Int[Array, " B"]:
    """For each row, the index of its largest value over all shards."""
    return _largest_of_parts(shard, x.shape[1], _of_rows(x), lambda: x.max(axis=1))


def _largest_of_parts(shard: VocabShard, size: int, place: Int[Array, " B"], largest: Callable[[], Float[Array, " B"]]) -> Int[Array, " B"]:
    """The maximum over shards, from each shard's argmax; one all-gather of pairs."""
    if shard.is_whole:
        return place
    value = jax.lax.bitcast_convert_type(largest().astype(jnp.float32), jnp.int32)
    pairs = shard.all_gather(jnp.stack([value, shard.first(size) + place]))
    values, places = jax.lax.bitcast_convert_type(pairs[:, 0], jnp.float32), pairs[:, 1]
    return jnp.take_along_axis(places, _first_of_largest(values, axis=0)[None], axis=0, mode="promise_in_bounds")[0]


def first_place(holds: Bool[Array, "A C"], axis: int) -> Int[Array, " B"]:
    """The first index along an axis where the condition holds; the last index if nowhere."""
    size = holds.shape[axis]
    place = jnp.expand_dims(jnp.arange(size, dtype=jnp.int32), 1 - axis)
    return jnp.min(jnp.where(holds, place, size - 1), axis=axis)


def _of_rows(x: Float[Array, "B X"]) -> Int[Array, " B"]:
    batch, size = x.shape
    if size % _LANES:
        return _first_of_largest(x, axis=1)
    runs = x.reshape(batch, size // _LANES, _LANES)
    best = runs.max(axis=2)
    largest = best.max(axis=1, keepdims=True)
    run = first_place(best == largest, axis=1)
    lanes = jnp.take_along_axis(runs, run[:, None, None], axis=1, mode="promise_in_bounds")[:, 0]
    return run * _LANES + first_place(lanes == largest, axis=1)


def _of_columns(x: Float[Array, "X B"]) -> Int[Array, " B"]:
    size, batch = x.shape
    if size % _LANES:
        return _first_of_largest(x, axis=0)
    runs = x.reshape(size // _LANES, _LANES, batch)
    best = runs.max(axis=1)
    largest = best.max(axis=0, keepdims=True)
    run = first_place(best == largest, axis=0)
    lanes = jnp.take_along_axis(runs, run[None, None, :], axis=0, mode="promise_in_bounds")[0]
    return run * _LANES + first_place(lanes == largest, axis=0)


def _first_of_largest(x: Float[Array, "A C"], axis: int) -> Int[Array, " B"]:
    return first_place(x == jnp.max(x, axis=axis, keepdims=True), axis)
