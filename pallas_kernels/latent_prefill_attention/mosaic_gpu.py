"""latent_prefill_attention on NVIDIA GPUs from Hopper on: runs of context, each expanded by one product, then
ragged_prefill_attention's kernel.

Expanded keys and values are never concatenated. The kernel's copy engine fetches a head's own key columns and its
values from the result of the product, and the columns that all heads share from the latents. As in xla.py no token is
expanded twice, and the pages of all requests follow one another in one list that is cut into runs. A run is at least as
long as the step, so that a prompt without a prefix is one run, unless the expansion would exceed 268 MB in
DeepSeek-V3's sizes. Results of several runs are combined after each run, in the pages' type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_prefill_attention.page_list import PageList
from pallas_kernels.mosaic.attention import INITIAL_MAX
from pallas_kernels.mosaic.card import Card, card_for, target_device
from pallas_kernels.mosaic.split_combine import combine_splits
from pallas_kernels.mosaic.tuned_tilings import tuned_tiling
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup
from pallas_kernels.ragged_prefill_attention.mosaic_gpu import kernel_unsupported_reason
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
from pallas_kernels.span import FULL_ATTENTION

# Tokens of context that are expanded at once, times heads. The minimum: the host starts each run. The maximum: the
# expansion is held in memory.
_MIN_RUN_TOKENS, _MAX_RUN_TOKENS = 2**16, 2**19
_MIN_TOKENS = 1024  # minimum of a run, however many heads: products should be large
_MAX_VALUE_SIZE = 256  # columns that fit in a warpgroup's registers
_COLUMNS = 16  # rows of shared memory have multiples of this many columns


def unsupported_reason(
    dtype: jnp.dtype, key_sizes: tuple[int, int], value_size: int, page_size: int, query_tile: int, card: Card
) -> str | None:
    """Why this kernel can't attend over such latents; None if it can. `key_sizes`: columns of a key that are a head's
    own, and that heads share."""
    own, shared = key_sizes
    if own % _COLUMNS or shared % _COLUMNS:
        return f"it has no kernel for latents' keys of {own} and {shared} columns: they must be multiples of {_COLUMNS}"
    if value_size != own or value_size > _MAX_VALUE_SIZE:
        return f"it has no kernel for latents' values of {value_size} columns: they must be as many as a key's own, {own}, and at most {_MAX_VALUE_SIZE}"
    return kernel_unsupported_reason(dtype, (own + shared, value_size), page_size, query_tile, card)


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
    tiling: PrefillTiling | None = None,
    splits: int | None = None,
    run_tokens: int | None = None,
    interpreted: bool = False,
) -> Float[Array, "T N V"]:
    """See op.py. `interpreted`: run by JAX's interpreter on a CPU. Raises `ValueError` for a scale that is not
    positive."""
    if scale <= 0:
        raise ValueError(f"latent_prefill_attention: for mosaic_gpu scale {scale} must be positive")
    del pool_is_finite  # finite latents may overflow when they are expanded
    num_tokens, num_heads, head_size = q.shape
    dtype, rank = latent_pages.dtype, len(up)
    pages = PageList.for_rows(latent_pages, layer, page_table, jnp.where(query_len > 0, kv_len, 0), axis)
    own_size = head_size - (latent_pages.shape[5] - rank)
    card = card_for(target_device())
    shape = {"num_heads": num_heads, "head_size": head_size, "page_size": pages.page_size, "tokens": num_tokens}
    best = tuned_tiling("latent_prefill_attention", {"dtype": dtype.name, **shape})
    tiling = tiling or (PrefillTiling(**best) if best else tiling_for(1, head_size, up.shape[2] - own_size, card))
    tokens_per_run = run_tokens or min(max(num_tokens, _MIN_RUN_TOKENS // num_heads, _MIN_TOKENS), _MAX_RUN_TOKENS // num_heads)
    run_pages = max(1, min(tokens_per_run // pages.page_size, page_table.size))
    tokens_per_run = run_pages * pages.page_size
    run, piece = math.gcd(pages.page_size, tiling.tokens), math.gcd(query_tile, tiling.queries, ROWS)
    is_one_run = run_pages == page_table.size
    tiles = query_tiles(query_start, query_len, num_tokens, tiling, piece)
    tile_of_token = tile_per_token(tiles, num_tokens, piece)
    splits = splits or splits_for(num_heads * len(tiles.first), tokens_per_run, card)
    warpgroup = Warpgroup(interpreted, card.has_wgmma)
    kernel = PrefillKernel(warpgroup, tiling, splits, piece, scale, pool_is_finite=False, is_partial_context=not is_one_run)

    def attend(i: Int[Array, ""] | int) -> tuple[Float[Array, "S T N V"], Float[Array, "S T N"] | None]:
        """The queries' results over a run of context by KV split, and their weights."""
        latents = pages.read_whole(i * run_pages + jnp.arange(run_pages))
        expanded = jnp.einsum("sr,rne->sne", latents[:, :rank].astype(up.dtype), up, preferred_element_type=jnp.float32).astype(dtype)
        # where each request's context begins, relative to the run; negative before it
        begin = pages.begin * pages.page_size - i * tokens_per_run
        before = jnp.maximum(-begin, 0)
        num_keys = jnp.clip(jnp.minimum(kv_len, tokens_per_run - begin) - before, 0)
        work = tile_work(tiles, kv_len - before, num_keys, tiling, run, FULL_ATTENTION)
        context = _ExpandedLatents(run, own_size, rank, expanded, latents, jnp.maximum(begin, 0) // run)
        out, weights = kernel.call(q, context, dtype, work)
        return out, None if weights is None else rows_to_tokens(weights, tiles, tile_of_token, tiling, piece)

    if is_one_run:
        out, weights = attend(0)
        return out[0].astype(q.dtype) if weights is None else combine_splits(warpgroup, out, weights, q.dtype)

    def add(i: Int[Array, ""], sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds a run's results to those of the runs before."""
        out, weights = attend(i)
        assert weights is not None
        here, weight = out[0], weights[0]
        if splits > 1:
            here, weight = combine_splits(warpgroup, out, weights, dtype), _total(weights)
        mean, before = sums
        both = jnp.logaddexp2(before, weight)
        earlier, later = (each.astype(jnp.float32) * jnp.exp2(of - both)[..., None] for each, of in ((mean, before), (here, weight)))
        return (earlier + later).astype(dtype), both

    empty = jnp.zeros((num_tokens, num_heads, own_size), dtype), jnp.full((num_tokens, num_heads), INITIAL_MAX)
    return lax.fori_loop(0, pages.num_runs(run_pages), add, empty)[0].astype(q.dtype)


@dataclass(frozen=True)
class _ExpandedLatents:
    """An expanded run of context, as the kernel's KV source."""

    run: int
    value_size: int
    rank: int  # columns of a latent that are expanded
    expanded: Float[Array, "S N E"]  # of each head: its own key columns, then its values
    latents: Float[Array, "S C"]  # the columns past `rank` are shared by all heads' keys
    begin: Int[Array, " X"]  # where each request's context begins, in runs that are copied at once
    ends_early: bool = True

    @property
    def key_sizes(self) -> tuple[int, ...]:
        shared = self.latents.shape[1] - self.rank
        return (self.value_size, shared) if shared else (self.value_size,)

    @property
    def operands(self) -> tuple[Array, ...]:
        return self.expanded, self.latents, self.begin

    def locate(self, refs: Sequence[Any], work: TileWork, run: Array) -> Array:
        """Index of the run among all requests' runs."""
        return refs[2][work.row] + run

    def keys_and_values(self, refs: Sequence[Any], place: Array, head: Array, num_heads: int) -> tuple[list[Any], list[Any]]:
        del num_heads
        expanded, latents, _ = refs
        tokens, size = pl.ds(place * self.run, self.run), self.value_size
        own, values = (expanded.at[tokens, head, pl.ds(first, size)] for first in (0, size))
        shared = [latents.at[tokens, pl.ds(self.rank, each)] for each in self.key_sizes[1:]]
        return [own, *shared], [values]


def _total(weights: Float[Array, "S *X"]) -> Float[Array, " *X"]:
    """The weight of all splits together."""
    top = weights.max(0)
    return top + jnp.log2(jnp.exp2(weights - top).sum(0))
