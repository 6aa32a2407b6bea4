"""paged_attention: one query token a request over that request's KV pages (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention import llvm_cpu, reference, xla
from pallas_kernels.paged_attention.llvm_tiles import LANES

_IMPLEMENTATIONS = {"llvm_cpu": llvm_cpu.paged_attention, "xla": xla.paged_attention, "reference": reference.paged_attention}


def paged_attention(
    q: Float[Array, "B N H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool = False,
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
      backend: 'llvm_cpu' (CPU devices, and pages that `why_not` has nothing against), 'xla' or 'reference'.

    Returns the attention output in q's type; scores and sums are float32. Raises `ValueError` for shapes that do not fit together, or
    that the backend can't run.
    """
    if q.ndim != 3 or kv_pages.ndim != 6 or kv_pages.shape[1] != 2 or q.shape[2] != kv_pages.shape[5] or q.shape[1] % kv_pages.shape[3]:
        raise ValueError(
            f"paged_attention: q {q.shape} must be [B, N, H] and kv_pages {kv_pages.shape} [L, 2, P, K, G, H], with the same H and N a multiple of K"
        )
    if page_table.shape[0] != q.shape[0] or kv_len.shape != (q.shape[0],):
        raise ValueError(f"paged_attention: page_table {page_table.shape} and kv_len {kv_len.shape} must have q's {q.shape[0]} rows")
    if backend == "llvm_cpu" and (reason := why_not(kv_pages.dtype, q.shape[2])):
        raise ValueError(f"paged_attention: llvm_cpu can't run: {reason}")
    return _IMPLEMENTATIONS[backend](q, kv_pages, layer, page_table, kv_len, scale=scale, pool_is_finite=pool_is_finite)


def why_not(dtype: jnp.dtype, head_size: int) -> str | None:
    """Why 'llvm_cpu' can't attend over pages of this type and head size on a CPU; None if it can."""
    if dtype != jnp.float32:
        return f"it has no kernel for {dtype.name} pages"
    if head_size % LANES:
        return f"it has no kernel for heads of {head_size}: they must be a multiple of {LANES}"
    return None
