"""What paged_attention must compute, in the plainest jnp: gather every page, mask, softmax. Slow, for tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.seen import first_seen
from pallas_kernels.span import EVERYTHING, Span


def paged_attention(*arguments: Any, **options: Any) -> Float[Array, "B N V"]:
    """`paged_attention_and_lse`'s first result."""
    return paged_attention_and_lse(*arguments, **options)[0]


def paged_attention_and_lse(
    q: Float[Array, "B N H"],
    kv_pages: Float[Array, "L S P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool,
    span: Span = EVERYTHING,
    soft_cap: float | None = None,
    kv_scales: Float[Array, "L S K"] | None = None,
    value_size: int | None = None,
) -> tuple[Float[Array, "B N V"], Float[Array, "B N"]]:
    """See op.py."""
    del pool_is_finite
    num_kv_heads, page_size = kv_pages.shape[3:5]
    batch, num_heads, head_size = q.shape

    def gathered(side: int) -> Float[Array, "B K S H"]:
        found = jnp.moveaxis(kv_pages[layer, side][page_table], 2, 1).reshape(batch, num_kv_heads, -1, head_size).astype(jnp.float32)
        return found if kv_scales is None else found * kv_scales[layer, side][:, None, None]

    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_size).astype(jnp.float32)
    position, ends = jnp.arange(page_table.shape[1] * page_size), kv_len[:, None]
    valid = (position < ends) & (position >= first_seen(span, ends - 1))
    scores = jnp.einsum("bknh,bksh->bkns", grouped, gathered(0), precision="highest") * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(valid[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    # A masked weight is 0, but 0 * NaN is NaN: what lies in unused places must not matter.
    values = jnp.where(valid[:, None, :, None], gathered(-1)[..., :value_size], 0.0)
    out = jnp.einsum("bkns,bksh->bknh", weights, values, precision="highest")
    lse = jnp.maximum(jax.nn.logsumexp(scores, axis=-1), -1e30).reshape(batch, num_heads)
    return jnp.where(kv_len[:, None, None] > 0, out.reshape(batch, num_heads, -1), 0.0).astype(q.dtype), lse
