"""Masks over the vocabulary, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.layers.vocabulary import VocabShard

_BITS = 32


def masked(shard: VocabShard, scores: Float[Array, "B V"], mask: Int[Array, "B W"]) -> Float[Array, "B V"]:
    """A shard's scores, minus infinity where the token's bit is 0. `mask`: of the whole vocabulary, the lowest bit
    first."""
    return jnp.where(_allowed(shard, mask, scores.shape[1]), scores, -jnp.inf)


def _allowed(shard: VocabShard, mask: Int[Array, "B W"], size: int) -> Bool[Array, "B V"]:
    if not shard.is_whole and size % _BITS == 0:  # whole words of this shard
        return _bits(jax.lax.dynamic_slice_in_dim(mask, shard.first(size) // _BITS, size // _BITS, axis=1))
    allowed = _bits(mask)
    if shard.is_whole:
        return allowed[:, :size]
    padded = jnp.pad(allowed, ((0, 0), (0, max(0, size * shard.num_shards - allowed.shape[1]))))
    return jax.lax.dynamic_slice_in_dim(padded, shard.first(size), size, axis=1)


def _bits(words: Int[Array, "B W"]) -> Bool[Array, "B 32*W"]:
    bits = (words[:, :, None] >> jnp.arange(_BITS, dtype=words.dtype)) & 1
    return bits.reshape(len(words), -1) == 1
