"""paged_attention in plain jnp, the specification: gather every page, mask, softmax. Slow, for tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.float8_pages import widened
from pallas_kernels.paged_attention.query_rows import group_by_kv_head, num_tokens, query_ends, restore_token_order
from pallas_kernels.span import FULL_ATTENTION, Span
from pallas_kernels.visibility import first_visible


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
    del pool_is_finite
    num_kv_heads, page_size = kv_pages.shape[3:5]
    batch, head_size = q.shape[0], q.shape[-1]

    def gather(side: int) -> Float[Array, "B K S H"]:
        found = widened(jnp.moveaxis(kv_pages[layer, side][page_table], 2, 1).reshape(batch, num_kv_heads, -1, head_size))
        return found if kv_scales is None else found * kv_scales[layer, side][:, None, None]

    rows = group_by_kv_head(q, num_kv_heads).astype(jnp.float32)
    position, ends = jnp.arange(page_table.shape[1] * page_size), query_ends(kv_len, rows.shape[2], num_tokens(q))[:, None, :, None]
    valid = (position < ends) & (position >= first_visible(span, ends - 1))  # [B, 1, R, S]
    scores = jnp.einsum("bkrh,bksh->bkrs", rows, gather(0), precision="highest") * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(valid, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    # A masked weight is 0, but 0 * NaN is NaN: contents of unused slots must not matter.
    values = jnp.where(valid.any(2)[..., None], gather(-1)[..., :value_size], 0.0)
    out = jnp.where(ends > 0, jnp.einsum("bkrs,bksh->bkrh", weights, values, precision="highest"), 0.0)
    lse = jnp.maximum(jax.nn.logsumexp(scores, axis=-1), -1e30)
    return restore_token_order(out, q).astype(q.dtype), restore_token_order(lse, q)
