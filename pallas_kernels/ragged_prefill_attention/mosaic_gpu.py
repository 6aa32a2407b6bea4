"""ragged_prefill_attention on NVIDIA GPUs from Hopper on: `mosaic_kernel` over KV pages. Where tiles are few, as for a
short question after a long conversation, several blocks share a context as KV splits. `combine_splits` combines their
results, which have q's type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.card import Card, card_for, miscompiled_reason, target_device
from pallas_kernels.mosaic.split_combine import combine_splits
from pallas_kernels.mosaic.tuned_tilings import tuned_tiling
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup
from pallas_kernels.ragged_prefill_attention.mosaic_kernel import PrefillKernel
from pallas_kernels.ragged_prefill_attention.mosaic_tile_work import (
    PrefillTiling,
    TileWork,
    query_tiles,
    rows_to_tokens,
    splits_for,
    tile_per_token,
    tile_work,
    tiling_for,
)
from pallas_kernels.span import FULL_ATTENTION, Span

_MAX_HEAD_SIZE = 256
_COPIED_ROWS = 8  # rows of shared memory are copied by eights


def unsupported_reason(dtype: jnp.dtype, head_size: int, page_size: int, query_tile: int, card: Card) -> str | None:
    """Why this kernel can't attend over such pages in such tiles on this GPU; None if it can."""
    if head_size % 16 or head_size > _MAX_HEAD_SIZE:
        return f"it has no kernel for heads of {head_size}: they must be a multiple of 16, at most {_MAX_HEAD_SIZE}"
    return kernel_unsupported_reason(dtype, (head_size, head_size), page_size, query_tile, card)


def kernel_unsupported_reason(dtype: jnp.dtype, sizes: tuple[int, int], page_size: int, query_tile: int, card: Card) -> str | None:
    """The same for any source of keys and values of such sizes."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it has no kernel for {dtype.name} pages"
    if page_size % _COPIED_ROWS:
        return f"it has no kernel for pages of {page_size} tokens: they must be a multiple of {_COPIED_ROWS}"
    if query_tile % _COPIED_ROWS:
        return f"it has no kernel for tiles of {query_tile} query tokens, as of prefill buckets that are no multiple of {_COPIED_ROWS}"
    if not tiling_for(1, *sizes, card).stages:
        return f"it has no kernel for heads of {sizes[0]} on a card with {card.shared_memory} bytes of shared memory a block"
    return miscompiled_reason()


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
    tiling: PrefillTiling | None = None,
    splits: int | None = None,
    interpreted: bool = False,
) -> Float[Array, "T N H"]:
    """See op.py. `interpreted`: run by JAX's interpreter on a CPU. Raises `ValueError` for a scale that is not
    positive."""
    if scale <= 0:
        raise ValueError(f"ragged_prefill_attention: for mosaic_gpu scale {scale} must be positive")
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, page_size = kv_pages.shape[3:5]
    group = num_heads // num_kv_heads
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "page_size": page_size, "tokens": num_tokens}
    best = tuned_tiling("ragged_prefill_attention", {"dtype": kv_pages.dtype.name, **shape})
    card = card_for(target_device())
    tiling = tiling or (PrefillTiling(**best) if best else tiling_for(group, head_size, head_size, card))
    assert group % tiling.heads == 0, "a tile's heads share a KV head"
    run, piece = math.gcd(page_size, tiling.tokens), math.gcd(query_tile, tiling.queries, ROWS)
    tiles = query_tiles(query_start, query_len, num_tokens, tiling, piece)
    work = tile_work(tiles, kv_len, kv_len, tiling, run, span)
    if splits is None:
        splits = splits_for(num_heads // tiling.heads * len(tiles.first), page_table.shape[1] * page_size, card)
    kernel = PrefillKernel(Warpgroup(interpreted, card.has_wgmma), tiling, splits, piece, scale, pool_is_finite, span, soft_cap)
    out, weights = kernel.call(q, _PagedKV(run, kv_pages, layer, page_table), kv_pages.dtype, work)
    if weights is None:
        return out[0].astype(q.dtype)
    return combine_splits(
        kernel.warpgroup, out, rows_to_tokens(weights, tiles, tile_per_token(tiles, num_tokens, piece), tiling, piece), q.dtype
    )


@dataclass(frozen=True)
class _PagedKV:
    """The page pool as the kernel's KV source."""

    run: int
    kv_pages: Float[Array, "L 2 P K G H"]
    layer: Int[Array, ""]
    page_table: Int[Array, "R W"]
    ends_early: bool = False

    @property
    def key_sizes(self) -> tuple[int, ...]:
        return (self.value_size,)

    @property
    def value_size(self) -> int:
        return self.kv_pages.shape[-1]

    @property
    def operands(self) -> tuple[Array, ...]:
        return self.kv_pages, self.layer.reshape(1), self.page_table

    def locate(self, refs: Sequence[Any], work: TileWork, run: Array) -> tuple[Array, Array]:
        """The page of a run, and the run's index in the page."""
        runs_a_page = self.kv_pages.shape[4] // self.run
        return refs[2][work.row, lax.div(run, runs_a_page)], lax.rem(run, runs_a_page)

    def keys_and_values(self, refs: Sequence[Any], place: tuple[Array, Array], head: Array, num_heads: int) -> tuple[list[Any], list[Any]]:
        pages, layer, _ = refs
        num_kv_heads, page_size = self.kv_pages.shape[3:5]
        page, run = place

        def side(index: int) -> Any:
            tokens = pages.at[layer[0], index, page, lax.div(head, num_heads // num_kv_heads)]
            return tokens if self.run == page_size else tokens.at[pl.ds(run * self.run, self.run)]

        return [side(0)], [side(1)]
