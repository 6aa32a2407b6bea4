"""latent_prefill_attention: ragged_prefill_attention over pages of latents, expanded to keys and values on the way
(MLA, arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import KernelBackend
from pallas_kernels.latent_prefill_attention import mosaic_gpu, reference, xla
from pallas_kernels.mosaic.card import Card, card_for, target_device

_IMPLEMENTATIONS: dict[KernelBackend, Callable[..., Array]] = {
    "mosaic_gpu": mosaic_gpu.latent_prefill_attention,
    "xla": xla.latent_prefill_attention,
    "reference": reference.latent_prefill_attention,
}


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
    pool_is_finite: bool = False,
    axis: str | None = None,
    backend: KernelBackend = "xla",
) -> Float[Array, "T N V"]:
    """Causal attention of T packed query tokens, of at most X requests, over pages of latents that hold these tokens
    already.

    A latent of C = R + rope columns holds a key and a value of each head n. Its first R columns times up[:, n] give the
    first H - rope columns of the key and the V columns of the value. Its last rope columns, which all heads share,
    complete the key.

    Args:
      q: queries of N heads of size H; their last rope columns are rotated by their position as the latents' are.
      latent_pages: the page pool of L layers, P pages of G tokens. Contents outside a request's context may be
        anything, also NaN.
      layer: which of the L layers.
      page_table: the pages of each request in order; entries past its context are ignored but must lie in [0, P).
      query_start: where a request's tokens begin in q: a multiple of query_tile.
      query_len: number of the request's tokens in q; 0 for an unused row.
      kv_len: the request's context, these tokens included: its last query attends to all of it.
      up: the up-projection of latents, of E = H - rope + V columns a head.
      scale: multiplies the scores.
      query_tile: tokens a tile; T is a multiple of it. A tile holds tokens of one request.
      pool_is_finite: promises that the pool holds no NaN or infinity anywhere, which may spare masking outside a
        context.
      axis: the mesh axis, within a `shard_map`, whose devices each have G of every page's tokens, in order; None where
        pages are whole. Everything but heads is the same on all of them. Each device returns its own heads' attention
        to the whole context.
      backend: 'mosaic_gpu' (NVIDIA GPUs from Hopper on; see `unsupported_reason`), 'xla' or 'reference'.

    Returns the attention output in q's type; rows of q that belong to no request come out as 0. Scores and sums are
    float32. Keys and values have q's type where the pages have it too, float32 otherwise; for mosaic_gpu the pages'
    type. Raises `ValueError` for inconsistent shapes, or for what the backend can't run.
    """
    if q.ndim != 3 or latent_pages.ndim != 6 or latent_pages.shape[1] != 1 or latent_pages.shape[3] != 1:
        raise ValueError(
            f"latent_prefill_attention: q {q.shape} must be [T, N, H] and latent_pages {latent_pages.shape} [L, 1, P, 1, G, C]"
        )
    rope = latent_pages.shape[5] - up.shape[0]
    if up.ndim != 3 or up.shape[1] != q.shape[1] or rope < 0 or not 0 <= q.shape[2] - rope < up.shape[2]:
        raise ValueError(
            f"latent_prefill_attention: up {up.shape} must be [R, N, E] with the {q.shape[1]} heads of q {q.shape}, the first R of the "
            f"latents' {latent_pages.shape[5]} columns, and more than the columns of a head that are not shared"
        )
    if q.shape[0] % query_tile:
        raise ValueError(f"latent_prefill_attention: {q.shape[0]} tokens are not a multiple of query_tile {query_tile}")
    num_rows = page_table.shape[0]
    if any(a.shape != (num_rows,) for a in (query_start, query_len, kv_len)):
        raise ValueError(f"latent_prefill_attention: query_start, query_len and kv_len must each have page_table's {num_rows} rows")
    sizes = (q.shape[2] - rope, rope), up.shape[2] - (q.shape[2] - rope)
    page_size = latent_pages.shape[4] * (1 if axis is None else jax.lax.axis_size(axis))
    if against := unsupported_reason(backend, latent_pages.dtype, *sizes, page_size, query_tile):
        raise ValueError(f"latent_prefill_attention: {backend} can't run: {against}")
    rows = (page_table, query_start, query_len, kv_len)
    options = {"scale": scale, "query_tile": query_tile, "pool_is_finite": pool_is_finite, "axis": axis}
    return _IMPLEMENTATIONS[backend](q, latent_pages, layer, *rows, up, **options)


def unsupported_reason(
    backend: KernelBackend,
    dtype: jnp.dtype,
    key_sizes: tuple[int, int],
    value_size: int,
    page_size: int,
    query_tile: int,
    card: Card | None = None,
) -> str | None:
    """Why a backend can't attend over such latents, in pages of `page_size` tokens on all devices; None if it can, on a
    device of its kind. `key_sizes`: columns of a key that are a head's own, and that heads share. `card`: the target of
    'mosaic_gpu', where it is not the device that is compiled for."""
    if backend == "mosaic_gpu":
        return mosaic_gpu.unsupported_reason(dtype, key_sizes, value_size, page_size, query_tile, card or card_for(target_device()))
    return None if backend in _IMPLEMENTATIONS else "it has no kernel that expands latents: prefill over them takes 'xla'"
