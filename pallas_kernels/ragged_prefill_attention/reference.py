"""ragged_prefill_attention in plain jnp, the specification: every query against every cached token, masked. For
tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.float8_pages import widened
from pallas_kernels.span import FULL_ATTENTION, Span
from pallas_kernels.visibility import first_visible


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
    del query_tile, pool_is_finite
    num_kv_heads, page_size = kv_pages.shape[3:5]
    num_tokens, num_heads, head_size = q.shape
    place = jnp.arange(num_tokens)[:, None] - query_start
    is_of_row = (place >= 0) & (place < query_len)  # [T, R]
    row = jnp.argmax(is_of_row, axis=1)
    position = (kv_len - query_len)[row] + place[jnp.arange(num_tokens), row]
    position = jnp.where(is_of_row.any(axis=1), position, -1)

    def gather(pages: Float[Array, "P K G H"]) -> Float[Array, "T K S H"]:
        by_row = jnp.moveaxis(pages[page_table], 2, 1).reshape(page_table.shape[0], num_kv_heads, -1, head_size)
        return widened(by_row[row])

    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size).astype(jnp.float32)
    context, query = jnp.arange(page_table.shape[1] * page_size), position[:, None]
    valid = (context <= query) & (context >= first_visible(span, query))
    scores = jnp.einsum("tknh,tksh->tkns", grouped, gather(kv_pages[layer, 0]), precision="highest") * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores, -jnp.inf), axis=-1)
    values = jnp.where(valid[:, None, :, None], gather(kv_pages[layer, 1]), 0.0)
    out = jnp.einsum("tkns,tksh->tknh", weights, values, precision="highest").reshape(q.shape)
    return jnp.where((position >= 0)[:, None, None], out, 0.0).astype(q.dtype)
