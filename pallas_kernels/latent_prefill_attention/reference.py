"""latent_prefill_attention in plain jnp, the specification: every latent expanded, every query against every key,
masked. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.float8_pages import widened


def latent_prefill_attention(
    q: Float[Array, "T N H"],
    latent_pages: Float[Array, "L 1 P 1 G C"],
    layer: Int[Array, ""],
    page_table: Int[Array, "X W"],
    query_start: Int[Array, " X"],
    query_len: Int[Array, " X"],
    kv_len: Int[Array, " X"],
    up: Float[Array, "R N E"],
    *,
    scale: float,
    query_tile: int,
    pool_is_finite: bool,
    axis: str | None = None,
) -> Float[Array, "T N V"]:
    """See op.py."""
    del query_tile, pool_is_finite
    if axis is not None:
        latent_pages = jax.lax.all_gather(latent_pages, axis, axis=4, tiled=True)
    num_tokens, num_heads, head_size = q.shape
    rank, width = len(up), latent_pages.shape[5]
    own_size = head_size - (width - rank)
    place = jnp.arange(num_tokens)[:, None] - query_start
    is_of_row = (place >= 0) & (place < query_len)  # [T, X]
    row = jnp.argmax(is_of_row, axis=1)
    position = (kv_len - query_len)[row] + place[jnp.arange(num_tokens), row]
    position = jnp.where(is_of_row.any(axis=1), position, -1)

    # [X, S, C]
    latents = widened(latent_pages[layer, 0, :, 0][page_table].reshape(len(page_table), -1, width))
    expanded = jnp.einsum("xsr,rne->xsne", latents[..., :rank], up.astype(jnp.float32), precision="highest")
    shared = jnp.broadcast_to(latents[:, :, None, rank:], (*latents.shape[:2], num_heads, width - rank))
    keys, values = jnp.concatenate([expanded[..., :own_size], shared], axis=-1)[row], expanded[..., own_size:][row]

    valid = jnp.arange(latents.shape[1]) <= position[:, None]
    scores = jnp.einsum("tnh,tsnh->tns", q.astype(jnp.float32), keys, precision="highest") * scale
    weights = jax.nn.softmax(jnp.where(valid[:, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("tns,tsnv->tnv", weights, jnp.where(valid[:, :, None, None], values, 0.0), precision="highest")
    return jnp.where((position >= 0)[:, None, None], out, 0.0).astype(q.dtype)
