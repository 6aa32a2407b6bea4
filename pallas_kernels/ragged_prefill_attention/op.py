"""ragged_prefill_attention: packed runs of new tokens of several requests, each over its cached prefix and, causally,
itself."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import KernelBackend
from pallas_kernels.llvm import page_values
from pallas_kernels.mosaic.card import Card, card_for, target_device
from pallas_kernels.ragged_prefill_attention import llvm_cpu, mosaic_gpu, reference, xla
from pallas_kernels.ragged_prefill_attention.llvm_blocking import LANES
from pallas_kernels.span import FULL_ATTENTION, Span

_IMPLEMENTATIONS: dict[KernelBackend, Callable[..., Array]] = {
    "mosaic_gpu": mosaic_gpu.ragged_prefill_attention,
    "llvm_cpu": llvm_cpu.ragged_prefill_attention,
    "xla": xla.ragged_prefill_attention,
    "reference": reference.ragged_prefill_attention,
}


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
    pool_is_finite: bool = False,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
    backend: KernelBackend = "xla",
) -> Float[Array, "T N H"]:
    """Causal attention of T packed query tokens, of at most R requests, over KV pages that hold these tokens already.

    Args:
      q: queries of N heads of size H; query head n reads KV head n // (N / K).
      kv_pages: the page pool of L layers, P pages of G tokens, keys first, then values. Contents outside a request's
        context may be anything, also NaN.
      layer: which of the L layers.
      page_table: the pages of each request in order; entries past its context are ignored but must lie in [0, P).
      query_start: where a request's tokens begin in q: a multiple of query_tile.
      query_len: number of the request's tokens in q; 0 for an unused row.
      kv_len: the request's context, these tokens included: its last query attends to all of it.
      scale: multiplies the scores, usually H ** -0.5.
      query_tile: tokens a tile; T is a multiple of it. A tile holds tokens of one request.
      pool_is_finite: promises that the pool holds no NaN or infinity anywhere, which may spare masking outside a
        context.
      span: which of its context a token attends to. Pages wholly before the spans of a tile's tokens may hold anything
        too, and most are not read.
      soft_cap: bounds scores: soft_cap * tanh(scores / soft_cap) (Gemma 2, arXiv:2408.00118).
      backend: 'mosaic_gpu' (NVIDIA GPUs from Hopper on), 'llvm_cpu' (CPU devices), 'xla' or 'reference'; see
        `unsupported_reason` for the first two.

    Returns the attention output in q's type; rows of q that belong to no request come out as 0. Scores and sums are
    float32. Raises `ValueError` for inconsistent shapes, or for what the backend can't run.
    """
    if q.ndim != 3 or kv_pages.ndim != 6 or kv_pages.shape[1] != 2 or q.shape[2] != kv_pages.shape[5] or q.shape[1] % kv_pages.shape[3]:
        raise ValueError(
            f"ragged_prefill_attention: q {q.shape} must be [T, N, H] and kv_pages {kv_pages.shape} [L, 2, P, K, G, H], "
            "with the same H and N a multiple of K"
        )
    if q.shape[0] % query_tile:
        raise ValueError(f"ragged_prefill_attention: {q.shape[0]} tokens are not a multiple of query_tile {query_tile}")
    num_rows = page_table.shape[0]
    if any(a.shape != (num_rows,) for a in (query_start, query_len, kv_len)):
        raise ValueError(f"ragged_prefill_attention: query_start, query_len and kv_len must each have page_table's {num_rows} rows")
    if against := unsupported_reason(backend, kv_pages.dtype, q.shape[2], kv_pages.shape[4], query_tile, span, soft_cap):
        raise ValueError(f"ragged_prefill_attention: {backend} can't run: {against}")
    rows = (page_table, query_start, query_len, kv_len)
    options = {} if span == FULL_ATTENTION and soft_cap is None else {"span": span, "soft_cap": soft_cap}
    return _IMPLEMENTATIONS[backend](
        q, kv_pages, layer, *rows, scale=scale, query_tile=query_tile, pool_is_finite=pool_is_finite, **options
    )


def unsupported_reason(
    backend: KernelBackend,
    dtype: jnp.dtype,
    head_size: int,
    page_size: int,
    query_tile: int,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
    card: Card | None = None,
) -> str | None:
    """Why a backend can't attend over pages of this type; None if it can, on a device of its kind. `card`: the target
    of 'mosaic_gpu', where it is not the device that is compiled for."""
    if backend == "mosaic_gpu":
        return mosaic_gpu.unsupported_reason(dtype, head_size, page_size, query_tile, card or card_for(target_device()))
    if backend != "llvm_cpu":
        return None
    if against := page_values.unsupported_reason(dtype):
        return f"ragged_prefill_attention has no kernel for {against}"
    if head_size % LANES:
        return f"ragged_prefill_attention has a kernel for head sizes in multiples of {LANES}, not {head_size}"
    if span != FULL_ATTENTION or soft_cap is not None:
        return "ragged_prefill_attention has no kernel for windows, chunks or soft caps"
    return None
