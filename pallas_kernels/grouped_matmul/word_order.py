"""The order of codes in the words of a tile: see `formats`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int32

OUTPUTS, INPUTS = 128, 128  # of a tile
WORDS = 16  # of a row: 64 bytes


def pack_tiles(codes: Int[Array, "E F D"], bits: int) -> Int32[Array, "E FT DT R 16"]:
    """Packs codes of `bits` bits into words, tile by tile."""
    experts, outputs, inputs = codes.shape
    pairs = 16 // bits
    # Inputs of a tile: part, word of a thread, pair of a word, thread, half of a register.
    cut = codes.reshape(experts, outputs // OUTPUTS, OUTPUTS, inputs // INPUTS, 4 // pairs, 4, pairs, 4, 2)
    moved = jnp.transpose(cut, (0, 1, 3, 4, 2, 7, 5, 8, 6))  # -> tile, part, output, thread, word, half, pair
    shifted = moved.astype(jnp.uint32) << (bits * jnp.arange(2 * pairs, dtype=jnp.uint32).reshape(2, pairs))
    words = lax.bitcast_convert_type(shifted.sum((-1, -2), dtype=jnp.uint32), jnp.int32)
    return words.reshape(experts, outputs // OUTPUTS, inputs // INPUTS, OUTPUTS * (4 // pairs), WORDS)


def unpack_tiles(words: Int32[Array, "*R 16"], bits: int) -> Int[Array, "*R I"]:
    """Codes of rows of words, in the order of their inputs."""
    pairs = 16 // bits
    codes = jnp.stack([(words >> (bits * i)) & (2**bits - 1) for i in range(2 * pairs)], -1)
    cut = codes.reshape(*words.shape[:-1], 4, 4, 2, pairs)  # thread, word, half, pair
    lead = tuple(range(words.ndim - 1))
    moved = jnp.transpose(cut, (*lead, *(len(lead) + axis for axis in (1, 3, 0, 2))))
    return moved.reshape(*words.shape[:-1], 8 * pairs * 4)
