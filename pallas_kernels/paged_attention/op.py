"""paged_attention: one query token a request over that request's KV pages (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention import llvm_cpu, mosaic_gpu, reference, xla
from pallas_kernels.paged_attention.llvm_tiles import LANES
from pallas_kernels.span import EVERYTHING, Span

_IMPLEMENTATIONS: dict[Backend, Callable[..., Array]] = {
    "mosaic_gpu": mosaic_gpu.paged_attention,
    "llvm_cpu": llvm_cpu.paged_attention,
    "xla": xla.paged_attention,
    "reference": reference.paged_attention,
}


def paged_attention(
    q: Float[Array, "B N H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool = False,
    span: Span = EVERYTHING,
    soft_cap: float | None = None,
    backend: Backend = "xla",
) -> Float[Array, "B N H"]:
    """Attention of one new token a request over its cached context.

    Args:
      q: queries, B requests of N heads of size H; query head n reads KV head n // (N / K).
      kv_pages: the page pool of L layers, P pages of G tokens, keys first, then values; what lies outside a request's context may be anything, NaN too.
      layer: which of the L layers.
      page_table: the pages of each request in order, W of them; entries past the context are ignored but must lie in [0, P).
      kv_len: tokens of context of each request, the new one included; 0 for a padded row, whose output is 0.
      scale: multiplies the scores, usually H ** -0.5.
      pool_is_finite: a promise that the pool holds no NaN or infinity anywhere, which may spare masking what lies outside a context.
      span: which of its context a token attends to; pages before it are not read.
      soft_cap: scores are bounded by it: soft_cap * tanh(scores / soft_cap) (Gemma 2, arXiv:2408.00118).
      backend: 'mosaic_gpu' (Hopper GPUs), 'llvm_cpu' (CPU devices), either for what `why_not` has nothing against; 'xla' or 'reference'.

    Returns the attention output in q's type; scores and sums are float32. Raises `ValueError` for shapes that do not fit together, or
    that the backend can't run.
    """
    if q.ndim != 3 or kv_pages.ndim != 6 or kv_pages.shape[1] != 2 or q.shape[2] != kv_pages.shape[5] or q.shape[1] % kv_pages.shape[3]:
        raise ValueError(
            f"paged_attention: q {q.shape} must be [B, N, H] and kv_pages {kv_pages.shape} [L, 2, P, K, G, H], with the same H and N a multiple of K"
        )
    if page_table.shape[0] != q.shape[0] or kv_len.shape != (q.shape[0],):
        raise ValueError(f"paged_attention: page_table {page_table.shape} and kv_len {kv_len.shape} must have q's {q.shape[0]} rows")
    group = q.shape[1] // kv_pages.shape[3]
    if reason := why_not(backend, kv_pages.dtype, group, q.shape[2], kv_pages.shape[4], span, soft_cap):
        raise ValueError(f"paged_attention: {backend} can't run: {reason}")
    options = {} if span == EVERYTHING and soft_cap is None else {"span": span, "soft_cap": soft_cap}
    return _IMPLEMENTATIONS[backend](q, kv_pages, layer, page_table, kv_len, scale=scale, pool_is_finite=pool_is_finite, **options)


def why_not(
    backend: Backend, dtype: jnp.dtype, group: int, head_size: int, page_size: int, span: Span = EVERYTHING, soft_cap: float | None = None
) -> str | None:
    """Why a backend can't attend so over pages of this type, a KV head for `group` query heads; None if it can, on a device of its kind."""
    if backend == "mosaic_gpu":
        return mosaic_gpu.why_not(dtype, group, head_size, page_size)
    if backend != "llvm_cpu":
        return None
    if dtype != jnp.float32:
        return f"it has no kernel for {dtype.name} pages"
    if head_size % LANES:
        return f"it has no kernel for heads of {head_size}: they must be a multiple of {LANES}"
    if span != EVERYTHING or soft_cap is not None:
        return "it has no kernel for windows, chunks or soft caps"
    return None
