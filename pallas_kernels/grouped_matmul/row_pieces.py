"""Pieces: which expert and which rows each block of work has. Known only at run time; the maximum number is known at
compile time."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int32


class PieceBounds(NamedTuple):
    """What pieces are derived from. Two reductions over experts give all of it, so that a GPU needs three kernels (two
    where tiles may begin anywhere). A program that multiplies by several matrices of the same experts computes it once,
    because it is the same expression."""

    row_ends: Int32[Array, " E"]  # rows of each expert and all before it
    piece_ends: Int32[Array, " E"]  # pieces of each expert and all before it
    owner: Int32[Array, " W"]  # expert of each possible piece, E if it has none
    first_row: Int32[Array, " W"]  # of its owner
    first_piece: Int32[Array, " W"]
    row_end: Int32[Array, " W"]


class RowPiece(NamedTuple):
    """Rows of one expert, or rows without an expert, in a tile of all rows."""

    expert: Int32[Array, ""]  # arbitrary if the rows have none
    start: Int32[Array, ""]  # first row of the tile, which ends before all rows do
    skip: Int32[Array, ""]  # rows of the tile before the piece's
    size: Int32[Array, ""]  # rows of the piece


def piece_bounds(group_sizes: Int[Array, " E"], num_rows: int, tile: int, align: int = 1) -> PieceBounds:
    """The bounds of the pieces of `num_rows` sorted rows. A piece has at most `tile` rows, in a tile that begins at a
    multiple of `align`, which divides both. Experts without rows have no piece."""
    num_experts = group_sizes.shape[0]
    sizes = group_sizes.astype(jnp.int32)
    at_most = jnp.arange(num_experts)[:, None] >= jnp.arange(num_experts)
    row_ends = jnp.where(at_most, sizes, 0).sum(1, dtype=jnp.int32)
    piece_ends = jnp.where(at_most, _pieces(row_ends - sizes, sizes, tile, align), 0).sum(1, dtype=jnp.int32)
    most = min(num_rows, (num_rows + (align - 1) * num_experts) // tile + num_experts + 1)
    is_done = jnp.arange(most, dtype=jnp.int32)[:, None] >= piece_ends  # per piece: the experts before its own
    first_row, first_piece = (jnp.where(is_done, ends, 0).max(1) for ends in (row_ends, piece_ends))
    row_end = jnp.where(is_done, num_rows, row_ends).min(1)
    return PieceBounds(row_ends, piece_ends, is_done.sum(1, dtype=jnp.int32), first_row, first_piece, row_end)


def num_pieces(work: PieceBounds, num_rows: int, tile: int, align: int = 1) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """The number of pieces that have an expert, and the number of all pieces: rows without an expert come last.
    `row_pieces` may be references, as for `piece`."""
    last = work.row_ends.shape[0] - 1
    owned = work.piece_ends[last]
    end = work.row_ends[last]
    return owned, owned + _pieces(end, num_rows - end, tile, align)


def piece(work: PieceBounds, i: Int32[Array, ""], num_rows: int, tile: int, align: int = 1) -> RowPiece:
    """The i-th piece of `num_rows` rows; num_rows >= tile."""
    first_row = work.first_row[i]
    place = first_row - lax.rem(first_row, align) + (i - work.first_piece[i]) * tile
    first, start = jnp.maximum(place, first_row), jnp.minimum(place, num_rows - tile)
    expert = jnp.minimum(work.owner[i], work.row_ends.shape[0] - 1)
    return RowPiece(expert, start, first - start, jnp.minimum(work.row_end[i], place + tile) - first)


def tile_for(num_rows: int, num_experts: int, smallest: int, largest: int) -> int:
    """Rows of a tile, a power of 2. It fits an expert's average share of the rows and half as many again, so that most
    experts need one tile."""
    share = -(-3 * num_rows // (2 * num_experts))
    return max(smallest, min(largest, 1 << (share - 1).bit_length()))


def _pieces(first: Int32[Array, "..."], rows: Int32[Array, "..."], tile: int, align: int) -> Int32[Array, "..."]:
    """Tiles that the rows lie in."""
    return jnp.where(rows > 0, lax.div(rows + lax.rem(first, align) + (tile - 1), tile), 0)
