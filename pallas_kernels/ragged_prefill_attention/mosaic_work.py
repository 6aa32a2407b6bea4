"""What the blocks of ragged_prefill_attention's kernel for GPUs have to do: which tokens and which tiles of context are each one's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.card import Card
from pallas_kernels.mosaic.warpgroup import ROWS
from pallas_kernels.seen import first_seen
from pallas_kernels.span import Span

WARPGROUPS = 2  # that multiply; the one after them fetches
TILE_ROWS = WARPGROUPS * ROWS
_SHORTEST_SHARE = 512  # tokens of context that are worth a block


@dataclass(frozen=True)
class Tiling:
    """How a call is cut up."""

    heads: int  # query heads a tile, a power of 2: of each it has 128 / heads query tokens
    tokens: int  # of a tile of keys or of values: a multiple of 64
    stages: int  # tiles of keys, and of values, on their way or in use

    @property
    def queries(self) -> int:
        """Query tokens of a tile."""
        return TILE_ROWS // self.heads


class Tiles(NamedTuple):
    """Tiles of query tokens, X of them; those left over have none."""

    first: Int[Array, " X"]  # piece of q
    end: Int[Array, " X"]  # past the last piece of q
    num_queries: Int[Array, " X"]  # tokens of a request, from the first on; the others are no one's
    row: Int[Array, " X"]  # the request's
    before_end: Int[Array, " X"]  # the first token's place in the request's queries, counted from their end, so negative


class Work(NamedTuple):
    """What each tile of query tokens has to do; those left over have nothing."""

    first: Int[Array, " X"]  # piece of q
    end: Int[Array, " X"]  # past the last piece of q that it writes
    num_queries: Int[Array, " X"]  # tokens of a request, from the first on; the others come out as 0
    row: Int[Array, " X"]  # the request's
    position: Int[Array, " X"]  # of the first query in its context; negative where it comes before all of it
    last: Int[Array, " X"]  # position of the last key that any of its queries sees
    start: Int[Array, " X"]  # where in its context the tiles of keys begin, in runs that are copied at once
    whole: Int[Array, " X"]  # the first tile of keys that all queries see all of: those before begin before some query's span
    edge: Int[Array, " X"]  # the tile after the last such one: from it on keys come after some query
    num_tiles: Int[Array, " X"]  # of keys


def tiling_for(group: int, key_size: int, value_size: int, card: Card) -> Tiling:
    """A tiling with as large products as registers and shared memory have room for, where nothing like it was tuned on this card. Without stages
    where the card has no room for any."""
    tokens = 2 * ROWS if value_size <= 128 and _stages(2 * ROWS, key_size, value_size, card) > 1 else ROWS
    return Tiling(math.gcd(group, 4), tokens, min(4, _stages(tokens, key_size, value_size, card)))


def _stages(tokens: int, key_size: int, value_size: int, card: Card) -> int:
    """That there is room for."""
    queries, stage = TILE_ROWS * key_size * 2, tokens * (key_size + value_size) * 2
    return max(0, card.shared_memory - 2048 - queries) // stage


def splits_for(num_blocks: int, max_context: int, card: Card) -> int:
    """Into how many shares each tile's context is cut: a few new tokens after a long prefix are few tiles, which would leave most multiprocessors
    without work."""
    return max(1, min(card.multiprocessors // num_blocks, max_context // _SHORTEST_SHARE))


def tiles_of(query_start: Int[Array, " R"], query_len: Int[Array, " R"], num_tokens: int, tiling: Tiling, piece: int) -> Tiles:
    """Tiles that together have every token of q once: each has up to tiling.queries / piece pieces of q, all of one request or all of none."""
    place = jnp.arange(0, num_tokens, piece, jnp.int32)
    is_of_row = (place[:, None] >= query_start) & (place[:, None] < query_start + query_len)
    owner = jnp.where(is_of_row.any(axis=1), jnp.argmax(is_of_row, axis=1), -1).astype(jnp.int32)
    is_first = jnp.concatenate([jnp.ones(1, bool), owner[1:] != owner[:-1]])
    begins = (place - lax.cummax(jnp.where(is_first, place, 0))) % tiling.queries == 0
    # Requests and the gaps around them each end with a tile that may not be full.
    num_tiles = min(len(place), num_tokens // tiling.queries + 2 * len(query_start) + 1)
    is_before = jnp.cumsum(begins) <= jnp.arange(num_tiles + 1)[:, None]
    bounds = is_before.sum(axis=1, dtype=jnp.int32)
    first, end = bounds[:-1], bounds[1:]

    row = owner[jnp.minimum(first, len(place) - 1)]
    num_queries = jnp.where(row < 0, 0, jnp.clip((query_start + query_len)[row] - first * piece, 0, (end - first) * piece))
    row = jnp.maximum(row, 0)
    return Tiles(first, end, num_queries, row, first * piece - (query_start + query_len)[row])


def work_of(tiles: Tiles, kv_len: Int[Array, " R"], num_keys: Int[Array, " R"], tiling: Tiling, run: int, span: Span) -> Work:
    """Keys from the first that any of a tile's queries sees to the last, in tiles that begin at a multiple of `run`. Of each request's context there
    are the first num_keys, kv_len or fewer; where that is less than it has queries the first of them come before all of it."""
    first, end, num_queries, row, _ = tiles
    position = jnp.where(num_queries > 0, kv_len[row] + tiles.before_end, 0)
    last = jnp.minimum(position + num_queries, num_keys[row]) - 1
    start = jnp.broadcast_to(first_seen(span, position), row.shape) // run
    # Tiles of keys up to a position, from the first on.
    num_key_tiles = jnp.where(num_queries > 0, jnp.maximum(-((start * run - 1 - last) // tiling.tokens), 0), 0)
    whole = jnp.clip(-((start * run - first_seen(span, last)) // tiling.tokens), 0, num_key_tiles)
    edge = jnp.clip((jnp.minimum(position, last) + 1 - start * run) // tiling.tokens, whole, num_key_tiles)
    return Work(first, end, num_queries, row, position, last, start, whole, edge, num_key_tiles)


def share_of(work: Work, share: Int[Array, ""], splits: int, tokens: int, run: int) -> Work:
    """A tile's work on one of so many shares of its tiles of keys; the last ones may have none."""
    most = -(-work.num_tiles // splits)
    begin = jnp.minimum(share * most, work.num_tiles)
    num_tiles = jnp.minimum(work.num_tiles - begin, most)
    whole = jnp.clip(work.whole - begin, 0, num_tiles)
    edge = jnp.clip(work.edge - begin, whole, num_tiles)
    return work._replace(start=work.start + begin * (tokens // run), whole=whole, edge=edge, num_tiles=num_tiles)


def tile_of_tokens(tiles: Tiles, num_tokens: int, piece: int) -> Int[Array, " T"]:
    """The tile that has each token of q."""
    return (jnp.arange(num_tokens, dtype=jnp.int32)[:, None] >= tiles.end * piece).sum(axis=1, dtype=jnp.int32)


def of_tokens(rows: Float[Array, "S M X R"], tiles: Tiles, tile: Int[Array, " T"], tiling: Tiling, piece: int) -> Float[Array, "S T N"]:
    """What each share has of each row of a tile, of M groups of heads, as each token of q, which its tile is given of, has it of each head."""
    splits, num_groups, num_tiles, _ = rows.shape
    by_query = rows.reshape(splits, num_groups, num_tiles, tiling.heads, tiling.queries)
    found = by_query[:, :, tile, :, jnp.arange(len(tile)) - tiles.first[tile] * piece]  # [T, S, M, heads]
    return jnp.moveaxis(found, 0, 1).reshape(splits, len(tile), -1)
