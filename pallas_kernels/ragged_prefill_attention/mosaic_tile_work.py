"""The work of the blocks of ragged_prefill_attention's kernel for GPUs: which tokens and which tiles of context each
has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.card import Card
from pallas_kernels.mosaic.warpgroup import ROWS
from pallas_kernels.span import Span
from pallas_kernels.visibility import first_visible

WARPGROUPS = 2  # consumers; the one after them fetches
TILE_ROWS = WARPGROUPS * ROWS
_MIN_SPLIT_TOKENS = 512  # tokens of context that are worth a block


@dataclass(frozen=True)
class PrefillTiling:
    """Tile sizes and pipeline depth of a call."""

    heads: int  # query heads a tile, a power of 2: each has 128 / heads query tokens
    tokens: int  # of a tile of keys or of values: a multiple of 64
    stages: int  # tiles of keys, and of values, that are in flight or in use

    @property
    def queries(self) -> int:
        """Query tokens of a tile."""
        return TILE_ROWS // self.heads


class QueryTiles(NamedTuple):
    """X tiles of query tokens; unused ones have no tokens."""

    first: Int[Array, " X"]  # first piece of q
    end: Int[Array, " X"]  # past the last piece of q
    num_queries: Int[Array, " X"]  # tokens of a request, from the first on; the rest belongs to no request
    row: Int[Array, " X"]  # index of the request
    # the first token's index in the request's queries, counted from their end, so negative
    before_end: Int[Array, " X"]


class TileWork(NamedTuple):
    """The work of each tile of query tokens; unused tiles have none."""

    first: Int[Array, " X"]  # first piece of q
    end: Int[Array, " X"]  # past the last piece of q that it writes
    num_queries: Int[Array, " X"]  # tokens of a request, from the first on; the rest comes out as 0
    row: Int[Array, " X"]  # index of the request
    position: Int[Array, " X"]  # of the first query in its context; negative where it comes before all of it
    last: Int[Array, " X"]  # position of the last key that any of its queries sees
    start: Int[Array, " X"]  # where in its context the tiles of keys begin, in runs that are copied at once
    # first tile of keys that all queries see in full: tiles before it begin before some query's span
    whole: Int[Array, " X"]
    edge: Int[Array, " X"]  # the tile after the last such one: from it on keys come after some query
    num_tiles: Int[Array, " X"]  # tiles of keys


def tiling_for(group: int, key_size: int, value_size: int, card: Card) -> PrefillTiling:
    """A tiling with products as large as fit in registers and shared memory, where nothing similar was tuned on this
    GPU. Without stages where none fits."""
    tokens = 2 * ROWS if value_size <= 128 and _stages(2 * ROWS, key_size, value_size, card) > 1 else ROWS
    return PrefillTiling(math.gcd(group, 4), tokens, min(4, _stages(tokens, key_size, value_size, card)))


def _stages(tokens: int, key_size: int, value_size: int, card: Card) -> int:
    """Stages that fit."""
    queries, stage = TILE_ROWS * key_size * 2, tokens * (key_size + value_size) * 2
    return max(0, card.shared_memory - 2048 - queries) // stage


def splits_for(num_blocks: int, max_context: int, card: Card) -> int:
    """KV splits of each tile's context. A few new tokens after a long prefix are few tiles, which would leave most
    multiprocessors without work."""
    return max(1, min(card.multiprocessors // num_blocks, max_context // _MIN_SPLIT_TOKENS))


def query_tiles(
    query_start: Int[Array, " R"], query_len: Int[Array, " R"], num_tokens: int, tiling: PrefillTiling, piece: int
) -> QueryTiles:
    """Tiles that together have every token of q once. Each has up to tiling.queries / piece pieces of q, all of one
    request or all of none."""
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
    return QueryTiles(first, end, num_queries, row, first * piece - (query_start + query_len)[row])


def tile_work(
    tiles: QueryTiles, kv_len: Int[Array, " R"], num_keys: Int[Array, " R"], tiling: PrefillTiling, run: int, span: Span
) -> TileWork:
    """The keys from the first that any of a tile's queries sees to the last, in tiles that begin at a multiple of
    `run`. Of each request's context the first num_keys keys are there, kv_len or fewer. Where that is less than the
    number of its queries, the first of them come before all of it."""
    first, end, num_queries, row, _ = tiles
    position = jnp.where(num_queries > 0, kv_len[row] + tiles.before_end, 0)
    last = jnp.minimum(position + num_queries, num_keys[row]) - 1
    start = jnp.broadcast_to(first_visible(span, position), row.shape) // run
    # Tiles of keys from the first to the last position.
    num_key_tiles = jnp.where(num_queries > 0, jnp.maximum(-((start * run - 1 - last) // tiling.tokens), 0), 0)
    whole = jnp.clip(-((start * run - first_visible(span, last)) // tiling.tokens), 0, num_key_tiles)
    edge = jnp.clip((jnp.minimum(position, last) + 1 - start * run) // tiling.tokens, whole, num_key_tiles)
    return TileWork(first, end, num_queries, row, position, last, start, whole, edge, num_key_tiles)


def split_work(work: TileWork, split: Int[Array, ""], splits: int, tokens: int, run: int) -> TileWork:
    """A tile's work on one of `splits` splits of its tiles of keys; the last ones may have none."""
    most = -(-work.num_tiles // splits)
    begin = jnp.minimum(split * most, work.num_tiles)
    num_tiles = jnp.minimum(work.num_tiles - begin, most)
    whole = jnp.clip(work.whole - begin, 0, num_tiles)
    edge = jnp.clip(work.edge - begin, whole, num_tiles)
    return work._replace(start=work.start + begin * (tokens // run), whole=whole, edge=edge, num_tiles=num_tiles)


def tile_per_token(tiles: QueryTiles, num_tokens: int, piece: int) -> Int[Array, " T"]:
    """The tile of each token of q."""
    return (jnp.arange(num_tokens, dtype=jnp.int32)[:, None] >= tiles.end * piece).sum(axis=1, dtype=jnp.int32)


def rows_to_tokens(
    rows: Float[Array, "S M X R"], tiles: QueryTiles, tile: Int[Array, " T"], tiling: PrefillTiling, piece: int
) -> Float[Array, "S T N"]:
    """From rows of tiles, by split and M groups of heads, to tokens of q and their heads. `tile`: the tile of each
    token."""
    splits, num_groups, num_tiles, _ = rows.shape
    by_query = rows.reshape(splits, num_groups, num_tiles, tiling.heads, tiling.queries)
    found = by_query[:, :, tile, :, jnp.arange(len(tile)) - tiles.first[tile] * piece]  # [T, S, M, heads]
    return jnp.moveaxis(found, 0, 1).reshape(splits, len(tile), -1)
