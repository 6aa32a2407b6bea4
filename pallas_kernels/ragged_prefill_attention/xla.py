"""ragged_prefill_attention for any device XLA compiles for: all query tiles at once, a loop over runs of pages, online
softmax.

The loop ends at the longest context among the rows, known only at run time, and begins where the first of their spans
does. Each tile gathers the pages of its row. A step that belongs to one row, as steps of long prompts do, is one tile:
pages are gathered once, and products have large matrices.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.float8_pages import widened
from pallas_kernels.span import FULL_ATTENTION, Span
from pallas_kernels.visibility import first_visible

RUN_TOKENS = 128  # context tokens gathered at once
_MASKED = -1e30


def ragged_prefill_attention(
    q: Float[Array, "T N H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "R W"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    kv_len: Int[Array, " R"],
    *,
    scale: float,
    query_tile: int,
    pool_is_finite: bool,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
) -> Float[Array, "T N H"]:
    """See op.py."""
    rows = (page_table, query_start, query_len, kv_len)
    attend = partial(_attend, q, kv_pages, layer, *rows, scale=scale, pool_is_finite=pool_is_finite, span=span, soft_cap=soft_cap)
    if query_tile == len(q):
        return attend(query_tile)
    return jax.lax.cond(jnp.sum(query_len > 0) <= 1, lambda: attend(len(q)), lambda: attend(query_tile))


def _attend(
    q: Array,
    kv_pages: Array,
    layer: Array,
    page_table: Array,
    query_start: Array,
    query_len: Array,
    kv_len: Array,
    query_tile: int,
    *,
    scale: float,
    pool_is_finite: bool,
    span: Span,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    num_layers, _, num_pages, num_kv_heads, page_size, head_size = kv_pages.shape
    num_tokens, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    num_tiles = num_tokens // query_tile
    run_pages = min(max(RUN_TOKENS // page_size, 1), page_table.shape[1])
    run_tokens = run_pages * page_size

    # A tile belongs to one row: rows start at multiples of query_tile, and a single tile belongs to the longest row.
    tile_start = jnp.arange(num_tiles) * query_tile
    is_of_row = (tile_start[:, None] >= query_start) & (tile_start[:, None] < query_start + query_len)
    row = jnp.argmax(is_of_row if num_tiles > 1 else query_len[None], axis=1)
    place = tile_start[:, None] + jnp.arange(query_tile) - query_start[row][:, None]
    in_use = (place >= 0) & (place < query_len[row][:, None])
    if num_tiles > 1:
        in_use &= is_of_row.any(axis=1)[:, None]
    position = jnp.where(in_use, (kv_len - query_len)[row][:, None] + place, -1)  # [tiles, tile]

    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % run_pages)))[row]
    grouped = (q.astype(jnp.float32) * scale).reshape(num_tiles, query_tile, num_kv_heads, group, head_size)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, group * query_tile, head_size)
    limit = jnp.tile(position, (1, group))  # [tiles, group * tile]
    # The first token that any query of a tile attends to; a tile without queries doesn't move the loop's begin.
    tile_first = jnp.where(in_use, first_visible(span, position), page_table.shape[1] * page_size).min(axis=1)
    pool = kv_pages.reshape(num_layers * 2 * num_pages * num_kv_heads, page_size * head_size)
    first_key_row = layer * 2 * num_pages * num_kv_heads
    first_value_row = first_key_row + num_pages * num_kv_heads

    def one_run(i: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, i * run_pages, run_pages, axis=1)
        rows = pages[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]

        def gather(rows: Int[Array, "R K C"]) -> Float[Array, "X K S H"]:
            return widened(jnp.take(pool, rows, axis=0, mode="clip").reshape(num_tiles, num_kv_heads, run_tokens, head_size))

        context = i * run_tokens + jnp.arange(run_tokens)
        scores = jnp.einsum("xkqh,xksh->xkqs", grouped, gather(rows + first_key_row))
        if soft_cap is not None:
            scores = jnp.tanh(scores / soft_cap) * soft_cap
        valid = context <= limit[:, :, None]
        if span != FULL_ATTENTION:
            valid &= context >= first_visible(span, limit[:, :, None])
        scores = jnp.where(valid[:, None], scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        # Masked weights are 0 once a query has seen a token. Whatever was summed before that is rescaled to 0 then.
        weights = jnp.exp(scores - new_top[..., None])
        values = gather(rows + first_value_row)
        if not pool_is_finite:
            cached = context <= position.max(axis=1)[:, None]
            if span != FULL_ATTENTION:
                cached &= context >= tile_first[:, None]
            values = jnp.where(cached[:, None, :, None], values, 0.0)  # a weight of 0 times NaN would be NaN
        rescale = jnp.exp(top - new_top)
        out = out * rescale[..., None] + jnp.einsum("xkqs,xksh->xkqh", weights, values)
        return new_top, total * rescale + weights.sum(-1), out

    shape = (num_tiles, num_kv_heads, group * query_tile)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_size)))
    num_runs = jnp.max(position) // run_tokens + 1
    first_run = 0 if span == FULL_ATTENTION else jnp.min(tile_first) // run_tokens
    _, total, out = jax.lax.fori_loop(first_run, num_runs, one_run, start)
    out = jnp.where((limit >= 0)[:, None, :, None], out / jnp.maximum(total, 1e-30)[..., None], 0.0)
    out = out.reshape(num_tiles, num_kv_heads, group, query_tile, head_size).transpose(0, 3, 1, 2, 4)
    return out.reshape(q.shape).astype(q.dtype)
