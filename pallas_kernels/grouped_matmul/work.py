"""Which expert and which rows each piece of work has: known when it runs, of a number that is known before."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int32


class Work(NamedTuple):
    """Pieces of at most so many rows, all of one expert; the last ones are of rows that have no expert."""

    ends: Int32[Array, " 2"]  # of the pieces with an expert, and of all, in the W that there is room for
    expert: Int32[Array, " W"]
    start: Int32[Array, " W"]  # first row of the tile that holds the piece; a tile ends before the rows do
    skip: Int32[Array, " W"]  # rows of that tile that come before the piece
    size: Int32[Array, " W"]  # rows of the piece


def work_for(group_sizes: Int[Array, " E"], num_rows: int, tile: int) -> Work:
    """The work of `num_rows` sorted rows, `tile` or more, in pieces of `tile`. Experts without rows have none.

    Sums and searches are comparisons with all experts: one kernel each on a GPU, where a scan would be dozens. A program that multiplies by
    several matrices of the same experts computes this once: it is the same expression.
    """
    num_experts = group_sizes.shape[0]
    sizes = group_sizes.astype(jnp.int32)
    sizes = jnp.concatenate([sizes, (num_rows - sizes.sum())[None]])
    at_most = jnp.arange(num_experts + 1)[:, None] >= jnp.arange(num_experts + 1)
    row_ends = jnp.where(at_most, sizes, 0).sum(1)
    pieces = lax.div(sizes + (tile - 1), tile)
    piece_ends = jnp.where(at_most, pieces, 0).sum(1)
    room = min(num_rows, num_rows // tile + num_experts + 1)
    piece = jnp.arange(room, dtype=jnp.int32)
    owner = jnp.minimum((piece[:, None] >= piece_ends).sum(1), num_experts)  # past the last: read by no one
    within = piece - (piece_ends - pieces)[owner]
    first = (row_ends - sizes)[owner] + within * tile
    start = jnp.clip(first, 0, num_rows - tile)
    return Work(
        piece_ends[-2:].astype(jnp.int32),
        jnp.minimum(owner, num_experts - 1).astype(jnp.int32),
        start.astype(jnp.int32),
        (first - start).astype(jnp.int32),
        jnp.minimum(tile, row_ends[owner] - first).astype(jnp.int32),
    )


def tile_for(num_rows: int, num_experts: int, smallest: int, largest: int) -> int:
    """Rows of a tile, a power of 2: experts have as many rows as their share and half as many again, so that most take one tile."""
    share = -(-3 * num_rows // (2 * num_experts))
    return max(smallest, min(largest, 1 << (share - 1).bit_length()))
