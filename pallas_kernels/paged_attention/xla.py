"""paged_attention for any device XLA compiles for: a loop over runs of pages with an online softmax (arXiv:1805.02867).

The loop's length is that of the batch's longest context, known only at run time. So one compiled program serves every
context, and a step's time follows what is cached. Nothing larger than one run of pages is ever gathered.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.float8_pages import widened
from pallas_kernels.paged_attention.query_rows import group_by_kv_head, num_tokens, query_ends, restore_token_order
from pallas_kernels.span import FULL_ATTENTION, Span
from pallas_kernels.visibility import first_visible

# Context tokens gathered at once over all rows: small enough to stay in a core's cache, large enough to hide the loop.
# A row gathers up to a whole run too many, so the more rows, the shorter the run.
_BATCH_RUN_TOKENS, _MIN_RUN_TOKENS, _MAX_RUN_TOKENS = 1024, 64, 256
_MASKED = -1e30


def paged_attention(*arguments: Any, **options: Any) -> Float[Array, "B *T N V"]:
    """`paged_attention_and_lse`'s first result."""
    return paged_attention_and_lse(*arguments, **options)[0]


def paged_attention_and_lse(
    q: Float[Array, "B *T N H"],
    kv_pages: Float[Array, "L S P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
    kv_scales: Float[Array, "L S K"] | None = None,
    value_size: int | None = None,
) -> tuple[Float[Array, "B *T N V"], Float[Array, "B *T N"]]:
    """See op.py."""
    num_layers, num_sides, num_pages, num_kv_heads, page_size, head_size = kv_pages.shape
    batch, tokens = q.shape[0], num_tokens(q)
    wanted_run = min(max(_BATCH_RUN_TOKENS // batch, _MIN_RUN_TOKENS), _MAX_RUN_TOKENS)
    run_pages = min(max(wanted_run // page_size, 1), page_table.shape[1])
    padding = -page_table.shape[1] % run_pages
    table = jnp.pad(page_table, ((0, 0), (0, padding)))
    queries = group_by_kv_head(q, num_kv_heads).astype(jnp.float32) * scale
    num_rows = queries.shape[2]
    # a factor a head: it multiplies the queries instead of the keys, and the result instead of the values
    if kv_scales is not None:
        queries *= kv_scales[layer, 0][:, None, None]
    # One row a (page, KV head): the gather then writes [B, K, S, H] directly, and no transpose follows it.
    pool = kv_pages.reshape(num_layers * num_sides * num_pages * num_kv_heads, page_size * head_size)
    first_key_row = layer * num_sides * num_pages * num_kv_heads
    first_value_row = first_key_row + (num_sides - 1) * num_pages * num_kv_heads
    run_tokens = run_pages * page_size
    ends = query_ends(kv_len, num_rows, tokens)[:, None, :, None]

    def one_run(i: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, i * run_pages, run_pages, axis=1)
        rows = pages[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]

        def gather(rows: Int[Array, "R K C"]) -> Float[Array, "B K S H"]:
            # "clip": page numbers are the allocator's, always in range, and the default mode would mask every element.
            return widened(jnp.take(pool, rows, axis=0, mode="clip").reshape(batch, num_kv_heads, run_tokens, head_size))

        position = i * run_tokens + jnp.arange(run_tokens)
        valid = position < ends  # [B, 1, R, S]
        if span != FULL_ATTENTION:
            valid &= position >= first_visible(span, ends - 1)
        # Multiply and reduce rather than a batched matmul of a few rows: XLA on CPU runs B*K tiny matmuls one after
        # another.
        scores = (queries[:, :, :, None] * gather(rows + first_key_row)[:, :, None]).sum(-1)
        if soft_cap is not None:
            scores = jnp.tanh(scores / soft_cap) * soft_cap
        scores = jnp.where(valid, scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        values = gather(rows + first_value_row)[..., :value_size]
        if not pool_is_finite:
            values = jnp.where(valid.any(2)[..., None], values, 0.0)  # a weight of 0 times NaN would be NaN
        rescale = jnp.exp(top - new_top)
        out = out * rescale[..., None] + (weights[..., None] * values[:, :, None]).sum(3)
        return new_top, total * rescale + weights.sum(-1), out

    start = (
        jnp.full((batch, num_kv_heads, num_rows), _MASKED),
        jnp.zeros((batch, num_kv_heads, num_rows)),
        jnp.zeros((batch, num_kv_heads, num_rows, value_size or head_size)),
    )
    num_runs = (jnp.max(kv_len) + run_tokens - 1) // run_tokens
    # Runs that no row's span reaches are skipped; padded rows don't count.
    first_runs = first_visible(span, jnp.maximum(kv_len - tokens, 0)) // run_tokens
    first_run = 0 if span == FULL_ATTENTION else jnp.min(jnp.where(kv_len > 0, first_runs, num_runs))
    top, total, out = jax.lax.fori_loop(first_run, num_runs, one_run, start)
    out = jnp.where(ends > 0, out / jnp.maximum(total, 1e-30)[..., None], 0.0)
    if kv_scales is not None:
        out *= kv_scales[layer, -1][:, None, None]
    # Without context top is still _MASKED, and everything else is negligible beside it.
    lse = top + jnp.log(jnp.maximum(total, 1e-30))
    return restore_token_order(out, q).astype(q.dtype), restore_token_order(lse, q)
