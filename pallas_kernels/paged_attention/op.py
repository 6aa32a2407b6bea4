"""paged_attention: one query token a request, or its last few, over that request's KV pages (PagedAttention,
arXiv:2309.06180)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import KernelBackend
from pallas_kernels.llvm import page_values
from pallas_kernels.mosaic.card import Card, card_for, target_device
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention import llvm_cpu, mosaic_gpu, mosaic_tiling, reference, xla
from pallas_kernels.paged_attention.llvm_tiles import LANES
from pallas_kernels.span import FULL_ATTENTION, Span

_IMPLEMENTATIONS: dict[KernelBackend, Callable[..., tuple[Array, Array]]] = {
    "mosaic_gpu": mosaic_gpu.paged_attention_and_lse,
    "xla": xla.paged_attention_and_lse,
    "reference": reference.paged_attention_and_lse,
}


def paged_attention(
    q: Float[Array, "B *T N H"],
    kv_pages: Float[Array, "L S P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool = False,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
    kv_scales: Float[Array, "L S K"] | None = None,
    value_size: int | None = None,
    backend: KernelBackend = "xla",
) -> Float[Array, "B *T N V"]:
    """Attention of each request's newest token, or its last T, over its cached context.

    Args:
      q: queries, B requests of N heads of size H; query head n reads KV head n // (N / K). [B, T, N, H] are those of
        the last T tokens of each context, in order, as speculative decoding needs them (arXiv:2211.17192): each attends
        to what comes before it, and to itself.
      kv_pages: the page pool of L layers, P pages of G tokens, S = 2 sides, keys first, then values. Latents (MLA,
        arXiv:2405.04434) have only one, whose columns hold both. Contents outside a request's context may be anything,
        also NaN.
      layer: which of the L layers.
      page_table: the pages of each request in order, W of them; entries past the context are ignored but must lie in
        [0, P).
      kv_len: tokens of context of each request, the new ones included; 0 for a padded row, whose output is 0. Where it
        is less than T, the first T - kv_len queries have no token, and their output is 0.
      scale: multiplies the scores, usually H ** -0.5.
      pool_is_finite: promises that the pool holds no NaN or infinity anywhere, which may spare masking outside a
        context.
      span: which of its context a token attends to; pages before it are not read.
      soft_cap: bounds scores: soft_cap * tanh(scores / soft_cap) (Gemma 2, arXiv:2408.00118).
      kv_scales: factors of a layer's keys and values by KV head, as pages of float8_e4m3fn need them; 1 if not given.
      value_size: for latents, how many of the H columns, the first, are values; None where values have pages of their
        own.
      backend: 'mosaic_gpu' (NVIDIA GPUs from Hopper on), 'llvm_cpu' (CPU devices, one token), 'xla' or 'reference'; see
        `unsupported_reason` for the first two.

    Returns the attention output in q's type and order, of V = H columns or value_size; scores and sums are float32.
    Raises `ValueError` for inconsistent shapes, or for what the backend can't run.
    """
    _check_shapes(q, kv_pages, page_table, kv_len, value_size)
    if kv_scales is not None and kv_scales.shape != (kv_pages.shape[0], kv_pages.shape[1], kv_pages.shape[3]):
        raise ValueError(
            f"paged_attention: kv_scales {kv_scales.shape} must be [L, {kv_pages.shape[1]}, K], a number a layer, side and KV head "
            f"of {kv_pages.shape}"
        )
    is_plain = q.ndim == 3 and span == FULL_ATTENTION and soft_cap is None and kv_scales is None and value_size is None
    _check_backend(backend, q, kv_pages, is_plain=is_plain, is_latent=value_size is not None)
    arguments = q, kv_pages, layer, page_table, kv_len
    if backend == "llvm_cpu":
        return llvm_cpu.paged_attention(*arguments, scale=scale, pool_is_finite=pool_is_finite)
    options = {} if is_plain else {"span": span, "soft_cap": soft_cap, "kv_scales": kv_scales, "value_size": value_size}
    return _IMPLEMENTATIONS[backend](*arguments, scale=scale, pool_is_finite=pool_is_finite, **options)[0]


def write_and_attend(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    page_ids: Int[Array, " B"],
    offsets: Int[Array, " B"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool = False,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
    backend: KernelBackend = "xla",
) -> tuple[Float[Array, "B N H"], Float[Array, "L 2 P K G H"]]:
    """Stores each request's new key and value, as `page_write.write` does, and attends to the context that ends with
    them. On 'mosaic_gpu' one launch does both where that was faster on the GPU (`mosaic_tiling.DecodeTiling.writes`).
    The pool is updated in place where it is donated.

    Args:
      k, v: the new token's, of each request.
      page_ids, offsets: the slot of position kv_len - 1. A padded row's slot may be written or not: its page belongs to
        no request.
      The others are `paged_attention`'s. New slots may hold anything, like everything outside of contexts.

    Returns the attention output in q's type, and the pool. Raises `ValueError` as `paged_attention` does.
    """
    _check_shapes(q, kv_pages, page_table, kv_len, None)
    rows = (q.shape[0], kv_pages.shape[3], q.shape[-1])
    if q.ndim != 3:
        raise ValueError(f"paged_attention: q {q.shape} must be [B, N, H]: several tokens are written by page_write.write before")
    if k.shape != rows or v.shape != rows or page_ids.shape != kv_len.shape or offsets.shape != kv_len.shape:
        raise ValueError(
            f"paged_attention: k {k.shape} and v {v.shape} must be {rows}, page_ids {page_ids.shape} and offsets {offsets.shape} {kv_len.shape}"
        )
    options: dict[str, Any] = {"scale": scale, "pool_is_finite": pool_is_finite, "span": span, "soft_cap": soft_cap}
    if backend == "mosaic_gpu":
        _check_backend(backend, q, kv_pages, is_plain=False, is_latent=False)
        return mosaic_gpu.write_and_attend(q, k, v, kv_pages, layer, page_table, page_ids, offsets, kv_len, **options)
    kv_pages = write(kv_pages, layer, (k, v), page_ids, offsets)
    return paged_attention(q, kv_pages, layer, page_table, kv_len, backend=backend, **options), kv_pages


def paged_attention_and_lse(
    q: Float[Array, "B *T N H"],
    kv_pages: Float[Array, "L S P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool = False,
    value_size: int | None = None,
    backend: KernelBackend = "xla",
) -> tuple[Float[Array, "B *T N V"], Float[Array, "B *T N"]]:
    """`paged_attention` to everything, and what is needed to combine it with attention to other parts of the same
    context: for each head the logarithm of the sum of its exponentiated scores, float32; below -1e29 for a row without
    context. Arguments and errors are the same; 'llvm_cpu' has no kernel for it."""
    _check_shapes(q, kv_pages, page_table, kv_len, value_size)
    _check_backend(backend, q, kv_pages, is_plain=False, is_latent=value_size is not None)
    options = {} if value_size is None else {"value_size": value_size}
    return _IMPLEMENTATIONS[backend](q, kv_pages, layer, page_table, kv_len, scale=scale, pool_is_finite=pool_is_finite, **options)


def _check_shapes(q: Array, kv_pages: Array, page_table: Array, kv_len: Array, value_size: int | None) -> None:
    num_sides = 2 if value_size is None else 1
    if (
        q.ndim not in (3, 4)
        or kv_pages.ndim != 6
        or kv_pages.shape[1] != num_sides
        or q.shape[-1] != kv_pages.shape[5]
        or q.shape[-2] % kv_pages.shape[3]
    ):
        raise ValueError(
            f"paged_attention: q {q.shape} must be [B, N, H] or [B, T, N, H] and kv_pages {kv_pages.shape} [L, {num_sides}, P, K, G, H], "
            "with the same H and N a multiple of K"
        )
    if value_size is not None and not 0 < value_size <= q.shape[-1]:
        raise ValueError(f"paged_attention: value_size is {value_size}: latents have {q.shape[-1]} columns")
    if page_table.shape[0] != q.shape[0] or kv_len.shape != (q.shape[0],):
        raise ValueError(f"paged_attention: page_table {page_table.shape} and kv_len {kv_len.shape} must have q's {q.shape[0]} rows")


def _check_backend(backend: KernelBackend, q: Array, kv_pages: Array, *, is_plain: bool, is_latent: bool) -> None:
    if reason := unsupported_reason(backend, kv_pages.dtype, q.shape[-1], kv_pages.shape[4], is_plain=is_plain, is_latent=is_latent):
        raise ValueError(f"paged_attention: {backend} can't run: {reason}")


def unsupported_reason(
    backend: KernelBackend,
    dtype: jnp.dtype,
    head_size: int,
    page_size: int,
    *,
    is_plain: bool = True,
    is_latent: bool = False,
    card: Card | None = None,
) -> str | None:
    """Why a backend can't attend over pages of this type; None if it can, on a device of its kind. Plain attention is
    one token's attention to everything, without soft cap, scales or latents. `card`: the target of 'mosaic_gpu', where
    it is not the device that is compiled for."""
    if backend == "mosaic_gpu":
        return mosaic_tiling.unsupported_reason(dtype, head_size, page_size, card or card_for(target_device()), is_latent=is_latent)
    if backend != "llvm_cpu":
        return None
    if against := page_values.unsupported_reason(dtype):
        return f"it has no kernel for {against}"
    if head_size % LANES:
        return f"it has no kernel for heads of {head_size}: they must be a multiple of {LANES}"
    return None if is_plain else "it has no kernel for several tokens, windows, chunks, soft caps, scales, latents or sums of exponentials"
