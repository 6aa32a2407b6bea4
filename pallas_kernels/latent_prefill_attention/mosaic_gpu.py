"""latent_prefill_attention on NVIDIA GPUs from Hopper on: runs of context, each expanded by one product, and ragged_prefill_attention's kernel over it.

What a token of context is expanded to is never put together: the kernel's copy engine brings a head's own columns of keys, and its values, from
where the product left them, and the columns that all heads share from the latents. As in xla.py no token is expanded twice, and the pages of all
requests follow one another in one list that runs are cut from. A run is as long as the step or longer, so that a prompt without a prefix is one, but
for what it is expanded to, at most 268 MB in DeepSeek-V3's sizes; what queries find in several is put together after each, in the pages' type.
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
from pallas_kernels.mosaic.attention import LOWEST
from pallas_kernels.mosaic.card import Card, card_of, compiled_for
from pallas_kernels.mosaic.shares import together
from pallas_kernels.mosaic.tuned import tuned
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup
from pallas_kernels.ragged_prefill_attention.mosaic_gpu import kernel_unsupported_reason
from pallas_kernels.ragged_prefill_attention.mosaic_kernel import Kernel
from pallas_kernels.ragged_prefill_attention.mosaic_work import (
    Tiling,
    Work,
    of_tokens,
    splits_for,
    tile_of_tokens,
    tiles_of,
    tiling_for,
    work_of,
)
from pallas_kernels.span import FULL_ATTENTION

# Tokens of context that are expanded at once, times heads, at least, for each run takes the host's word, and at most, for what is made is held.
_SHORTEST_RUN, _LONGEST_RUN = 2**16, 2**19
_FEWEST_TOKENS = 1024  # of a run, however many heads: products should be large
_LARGEST_VALUE = 256  # columns that a warpgroup has registers to sum up
_COLUMNS = 16  # that rows of shared memory are multiples of


def unsupported_reason(
    dtype: jnp.dtype, key_sizes: tuple[int, int], value_size: int, page_size: int, query_tile: int, card: Card
) -> str | None:
    """Why this kernel can't attend so over such latents; None if it can. `key_sizes`: of a head's own part of a key, and of what heads share."""
    own, shared = key_sizes
    if own % _COLUMNS or shared % _COLUMNS:
        return f"it has no kernel for latents' keys of {own} and {shared} columns: they must be multiples of {_COLUMNS}"
    if value_size != own or value_size > _LARGEST_VALUE:
        return f"it has no kernel for latents' values of {value_size} columns: they must be as many as a key's own, {own}, and at most {_LARGEST_VALUE}"
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
    tiling: Tiling | None = None,
    splits: int | None = None,
    run_tokens: int | None = None,
    interpreted: bool = False,
) -> Float[Array, "T N V"]:
    """See op.py. `interpreted`: by JAX's interpreter on a CPU. Raises `ValueError` for a scale that the kernel can't have."""
    if scale <= 0:
        raise ValueError(f"latent_prefill_attention: for mosaic_gpu scale {scale} must be positive")
    del pool_is_finite  # finite latents need not be finite once they are expanded
    num_tokens, num_heads, head_size = q.shape
    dtype, rank = latent_pages.dtype, len(up)
    pages = PageList.of_rows(latent_pages, layer, page_table, jnp.where(query_len > 0, kv_len, 0), axis)
    own_size = head_size - (latent_pages.shape[5] - rank)
    card = card_of(compiled_for())
    shape = {"num_heads": num_heads, "head_size": head_size, "page_size": pages.page_size, "tokens": num_tokens}
    best = tuned("latent_prefill_attention", {"dtype": dtype.name, **shape})
    tiling = tiling or (Tiling(**best) if best else tiling_for(1, head_size, up.shape[2] - own_size, card))
    of_run = run_tokens or min(max(num_tokens, _SHORTEST_RUN // num_heads, _FEWEST_TOKENS), _LONGEST_RUN // num_heads)
    run_pages = max(1, min(of_run // pages.page_size, page_table.size))
    of_run = run_pages * pages.page_size
    run, piece = math.gcd(pages.page_size, tiling.tokens), math.gcd(query_tile, tiling.queries, ROWS)
    is_one_run = run_pages == page_table.size
    tiles = tiles_of(query_start, query_len, num_tokens, tiling, piece)
    tile_of_token = tile_of_tokens(tiles, num_tokens, piece)
    splits = splits or splits_for(num_heads * len(tiles.first), of_run, card)
    warpgroup = Warpgroup(interpreted, card.has_wgmma)
    kernel = Kernel(warpgroup, tiling, splits, piece, scale, pool_is_finite=False, is_part=not is_one_run)

    def attend(i: Int[Array, ""] | int) -> tuple[Float[Array, "S T N V"], Float[Array, "S T N"] | None]:
        """What each share of a run of context has for the queries, and what that weighs."""
        latents = pages.read_whole(i * run_pages + jnp.arange(run_pages))
        expanded = jnp.einsum("sr,rne->sne", latents[:, :rank].astype(up.dtype), up, preferred_element_type=jnp.float32).astype(dtype)
        begin = pages.begin * pages.page_size - i * of_run  # where each request's context begins in the run, or before it
        before = jnp.maximum(-begin, 0)
        num_keys = jnp.clip(jnp.minimum(kv_len, of_run - begin) - before, 0)
        work = work_of(tiles, kv_len - before, num_keys, tiling, run, FULL_ATTENTION)
        context = _Expanded(run, own_size, rank, expanded, latents, jnp.maximum(begin, 0) // run)
        out, weights = kernel.call(q, context, dtype, work)
        return out, None if weights is None else of_tokens(weights, tiles, tile_of_token, tiling, piece)

    if is_one_run:
        out, weights = attend(0)
        return out[0].astype(q.dtype) if weights is None else together(warpgroup, out, weights, q.dtype)

    def add(i: Int[Array, ""], sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """A run's to those before."""
        out, weights = attend(i)
        assert weights is not None
        here, weight = out[0], weights[0]
        if splits > 1:
            here, weight = together(warpgroup, out, weights, dtype), _total(weights)
        mean, before = sums
        both = jnp.logaddexp2(before, weight)
        earlier, later = (each.astype(jnp.float32) * jnp.exp2(of - both)[..., None] for each, of in ((mean, before), (here, weight)))
        return (earlier + later).astype(dtype), both

    nothing = jnp.zeros((num_tokens, num_heads, own_size), dtype), jnp.full((num_tokens, num_heads), LOWEST)
    return lax.fori_loop(0, pages.num_runs(run_pages), add, nothing)[0].astype(q.dtype)


@dataclass(frozen=True)
class _Expanded:
    """A run of context, expanded, as a kernel's context."""

    run: int
    value_size: int
    rank: int  # of the latents' columns, what is expanded
    expanded: Float[Array, "S N E"]  # of each head's keys its own columns, then its values
    latents: Float[Array, "S C"]  # columns after the first are those that all heads' keys share
    begin: Int[Array, " X"]  # where each request's context begins, in runs that are copied at once
    ends_early: bool = True

    @property
    def key_sizes(self) -> tuple[int, ...]:
        shared = self.latents.shape[1] - self.rank
        return (self.value_size, shared) if shared else (self.value_size,)

    @property
    def operands(self) -> tuple[Array, ...]:
        return self.expanded, self.latents, self.begin

    def place(self, refs: Sequence[Any], work: Work, run: Array) -> Array:
        """Which run it is among all requests'."""
        return refs[2][work.row] + run

    def sides(self, refs: Sequence[Any], place: Array, head: Array, num_heads: int) -> tuple[list[Any], list[Any]]:
        del num_heads
        expanded, latents, _ = refs
        tokens, size = pl.ds(place * self.run, self.run), self.value_size
        own, values = (expanded.at[tokens, head, pl.ds(first, size)] for first in (0, size))
        shared = [latents.at[tokens, pl.ds(self.rank, each)] for each in self.key_sizes[1:]]
        return [own, *shared], [values]


def _total(weights: Float[Array, "S *X"]) -> Float[Array, " *X"]:
    """What shares weigh together."""
    top = weights.max(0)
    return top + jnp.log2(jnp.exp2(weights - top).sum(0))
