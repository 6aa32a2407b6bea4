"""ragged_prefill_attention on NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU.

A block of threads has a tile of 128 rows: query tokens of one request, of one or of several query heads that share a KV head. One
warpgroup has the copy engine bring tiles of keys and values from their pages, several ahead; two others, of 64 rows each, multiply and keep
an online softmax (FlashAttention, arXiv:2205.14135), and take turns: while one has the tensor cores, the other has its softmax
(FlashAttention-3, arXiv:2407.08608). Which tokens and which tiles of context a block has is worked out before, by XLA. Where tiles are few,
as those of a short question after a long conversation, their contexts are shared out to several blocks and put together afterwards, of results in q's type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.attention import LOG2_E, LOWEST, NOTHING, SMALLEST_FACTOR, drain, wait_if
from pallas_kernels.mosaic.card import Card, card_of, compiled_for
from pallas_kernels.mosaic.shares import together
from pallas_kernels.mosaic.tuned import tuned
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup, interleaved
from pallas_kernels.ragged_prefill_attention.mosaic_work import (
    TILE_ROWS,
    WARPGROUPS,
    Tiling,
    Work,
    of_tokens,
    share_of,
    splits_for,
    tiling_for,
    work_of,
)
from pallas_kernels.seen import first_seen
from pallas_kernels.span import EVERYTHING, Span

_LARGEST_HEAD = 256
_COPIED_ROWS = 8  # rows of shared memory are copied by eights


def why_not(dtype: jnp.dtype, head_size: int, page_size: int, query_tile: int, card: Card) -> str | None:
    """Why this kernel can't attend over such pages in such tiles on this card; None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it has no kernel for {dtype.name} pages"
    if head_size % 16 or head_size > _LARGEST_HEAD:
        return f"it has no kernel for heads of {head_size}: they must be a multiple of 16, at most {_LARGEST_HEAD}"
    if page_size % _COPIED_ROWS:
        return f"it has no kernel for pages of {page_size} tokens: they must be a multiple of {_COPIED_ROWS}"
    if query_tile % _COPIED_ROWS:
        return f"it has no kernel for tiles of {query_tile} query tokens, as of prefill buckets that are no multiple of {_COPIED_ROWS}"
    if not tiling_for(1, head_size, card).stages:
        return f"it has no kernel for heads of {head_size} on a card with {card.shared_memory} bytes of shared memory a block"
    return None


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
    span: Span = EVERYTHING,
    soft_cap: float | None = None,
    tiling: Tiling | None = None,
    splits: int | None = None,
    interpreted: bool = False,
) -> Float[Array, "T N H"]:
    """See op.py. `interpreted`: by JAX's interpreter on a CPU. Raises `ValueError` for a scale that the kernel can't have."""
    if scale <= 0:
        raise ValueError(f"ragged_prefill_attention: for mosaic_gpu scale {scale} must be positive")
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, page_size = kv_pages.shape[3:5]
    group = num_heads // num_kv_heads
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "page_size": page_size, "tokens": num_tokens}
    best = tuned("ragged_prefill_attention", {"dtype": kv_pages.dtype.name, **shape})
    card = card_of(compiled_for())
    tiling = tiling or (Tiling(**best) if best else tiling_for(group, head_size, card))
    assert group % tiling.heads == 0, "a tile's heads share a KV head"
    run, piece = math.gcd(page_size, tiling.tokens), math.gcd(query_tile, tiling.queries, ROWS)
    work = work_of(query_start, query_len, kv_len, num_tokens, tiling, piece, run, span)
    if splits is None:
        splits = splits_for(num_heads // tiling.heads * len(work.first), page_table.shape[1] * page_size, card)
    body = _Body(Warpgroup(interpreted, card.has_wgmma), tiling, splits, piece, run, page_size, scale, pool_is_finite, span, soft_cap)
    out, *weights = body.call(q.astype(kv_pages.dtype), kv_pages, layer, page_table, jnp.stack(work, axis=1))
    if not weights:
        return out[0].astype(q.dtype)
    return together(body.warpgroup, out, of_tokens(weights[0], work, num_tokens, tiling, piece), q.dtype)


@dataclass(frozen=True)
class _Body:
    """The kernel, of everything that is known when it is compiled."""

    warpgroup: Warpgroup
    tiling: Tiling
    splits: int  # shares of each tile's context
    piece: int  # query tokens that are copied at once
    run: int  # tokens of keys or values that are copied at once, from a page or a part of one
    page_size: int
    scale: float
    pool_is_finite: bool
    span: Span
    soft_cap: float | None

    def call(self, q: Array, kv_pages: Array, layer: Array, page_table: Array, work: Array) -> list[Array]:
        """Of each share the result, [S, T, N, H], and where they are several, what the rows of each tile weigh, [S, N / heads, X, rows]."""
        _, num_heads, head_size = q.shape
        num_groups = num_heads // self.tiling.heads
        weights = [jax.ShapeDtypeStruct((self.splits, num_groups, len(work), TILE_ROWS), jnp.float32)] if self.splits > 1 else []
        tiling, dtype, laid = self.tiling, kv_pages.dtype, interleaved(head_size, kv_pages.dtype)
        tiles = plgpu.SMEM((tiling.stages, tiling.tokens, head_size), dtype, transforms=laid)
        arrivals = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=tiling.tokens // self.run)
        consumed = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=WARPGROUPS)
        kernel = self.warpgroup.kernel(
            self._kernel,
            "ragged_prefill_attention",
            out_type=[jax.ShapeDtypeStruct((self.splits, *q.shape), dtype), *weights],
            grid=(num_groups, work.shape[0], self.splits),
            grid_names=("heads", "tile", "share"),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            scratch_types={
                "queries_or_out": plgpu.SMEM((WARPGROUPS, ROWS, head_size), dtype, transforms=laid),
                "keys": tiles,
                "values": tiles,
                "q_arrival": plgpu.Barrier(num_arrivals=TILE_ROWS // self.piece),
                "arrivals": (arrivals, arrivals),
                "consumed": (consumed, consumed),
                "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
                "cleared": plgpu.Barrier(num_arrivals=WARPGROUPS),
            },
            # Without barriers around every copy: where a warpgroup writes what it reads, it says so itself.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )
        results: list[Array] = kernel(q, kv_pages, layer.reshape(1), page_table, work)
        return results

    def _kernel(self, q: Any, kv: Any, layer: Any, page_table: Any, work: Any, out: Any, *weights: Any, **scratch: Any) -> None:
        # The last tiles of a prompt have the most to do: they come first.
        tile = work.shape[0] - 1 - lax.axis_index("tile")
        of_tile = Work(*(work[tile, i] for i in range(len(Work._fields))))
        share, index = lax.axis_index("share"), lax.axis_index("warpgroup")
        if self.splits > 1:
            of_tile = share_of(of_tile, share, self.splits, self.tiling.tokens, self.run)
        first_head = lax.axis_index("heads") * self.tiling.heads

        @pl.when(index < WARPGROUPS)
        def _attend() -> None:
            plgpu.set_max_registers(232, action="increase")
            rows = [weight.at[share, lax.axis_index("heads"), tile, pl.ds(pl.multiple_of(index * ROWS, ROWS), ROWS)] for weight in weights]
            self._attend(out.at[share], rows, of_tile, first_head, index, **scratch)

        @pl.when(index == WARPGROUPS)
        def _fetch() -> None:
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(first_head, q.shape[1] // kv.shape[3])
            pool = kv.at[layer[0]]
            self._fetch_queries(q, of_tile, first_head, **scratch)
            self._fetch(lambda side, page: pool.at[side, page, kv_head], page_table.at[of_tile.row], of_tile, **scratch)

    def _fetch_queries(self, q: Any, work: Work, first_head: Array, *, queries_or_out: Any, q_arrival: Any, **_: Any) -> None:
        """Bring the tile of queries; past the last token any others will do."""
        for place in range(0, TILE_ROWS, self.piece):
            head, offset = divmod(place, self.tiling.queries)
            piece = jnp.minimum(work.first + offset // self.piece, q.shape[0] // self.piece - 1)
            rows = queries_or_out.at[place // ROWS, pl.ds(place % ROWS, self.piece)]
            plgpu.copy_gmem_to_smem(q.at[self._tokens(piece), first_head + head], rows, q_arrival)

    def _fetch(self, page_at: Any, pages: Any, work: Work, *, keys: Any, values: Any, arrivals: Any, consumed: Any, **_: Any) -> None:
        """Bring the tiles of keys and values, as many ahead as there are stages."""
        num_runs, stages, tiles = self.tiling.tokens // self.run, self.tiling.stages, (keys, values)
        runs_a_page = self.page_size // self.run
        last = lax.div(work.position + work.num_queries - 1, self.run)

        def fetch(i: Array, _: None) -> None:
            stage = lax.rem(i, stages)
            # Past the context the last run comes again: nothing else is known to be a page of this request.
            runs = [jnp.minimum(work.start + i * num_runs + j, last) for j in range(num_runs)]
            ids = [pages[lax.div(run, runs_a_page)] for run in runs]
            for side in range(2):
                wait_if(i >= stages, consumed[side].at[stage])
                for j, (run, page) in enumerate(zip(runs, ids, strict=True)):
                    source = page_at(side, page)
                    if runs_a_page > 1:
                        source = source.at[pl.ds(lax.rem(run, runs_a_page) * self.run, self.run)]
                    plgpu.copy_gmem_to_smem(source, tiles[side].at[stage, pl.ds(j * self.run, self.run)], arrivals[side].at[stage])

        lax.fori_loop(0, work.num_tiles, fetch, None)
        drain(consumed, work.num_tiles, stages)

    def _attend(
        self,
        out: Any,
        weights: Sequence[Any],
        work: Work,
        first_head: Array,
        index: Array,
        *,
        queries_or_out: Any,
        keys: Any,
        values: Any,
        q_arrival: Any,
        arrivals: Any,
        consumed: Any,
        turn: Any,
        cleared: Any,
    ) -> None:
        """Attend with one warpgroup's rows over the tiles as they come."""
        warpgroup, tokens, rows = self.warpgroup, self.tiling.tokens, queries_or_out.at[index]
        head_size = rows.shape[1]
        plgpu.barrier_wait(q_arrival)

        def take_turn() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def one(i: Array, carry: tuple[Array, Array, Array], *, is_whole: bool) -> tuple[Array, Array, Array]:
            total, top, sum_ = carry
            stage = lax.rem(i, self.tiling.stages)
            plgpu.barrier_wait(arrivals[0].at[stage])
            scores, factor = self._capped(warpgroup.times_transposed(rows, keys.at[stage], take_turn))
            plgpu.barrier_arrive(consumed[0].at[stage])
            key = work.start * self.run + i * tokens
            if not is_whole:
                scores = jnp.where(self._is_seen(work.position, key, index), scores, NOTHING)
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sum_ = sum_ * shrink + weights.sum(axis=1)
            total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
            # The softmax comes before the other's turn in what ptxas is given. It moves the arrival before it: the other may begin its own softmax
            # at once, and the order of the products stays.
            total, sum_, top, weights = lax.optimization_barrier((total, sum_, new_top, weights.astype(rows.dtype)))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(arrivals[1].at[stage])
            if not is_whole and not self.pool_is_finite:
                self._clear(values.at[stage], work, key, index, cleared)
            plgpu.barrier_wait(turn)
            total = warpgroup.add_product(total, weights, values.at[stage])
            plgpu.barrier_arrive(consumed[1].at[stage])
            return total, top, sum_

        pl.when(index == 1)(take_turn)  # half a tile behind the other
        carry = warpgroup.full((ROWS, head_size), 0.0), warpgroup.full((ROWS,), LOWEST), warpgroup.full((ROWS,), 0.0)
        if self.span != EVERYTHING:
            carry = lax.fori_loop(0, work.whole, lambda i, carry: one(i, carry, is_whole=False), carry)
        carry = lax.fori_loop(work.whole, work.edge, lambda i, carry: one(i, carry, is_whole=True), carry)
        total, top, sum_ = lax.fori_loop(work.edge, work.num_tiles, lambda i, carry: one(i, carry, is_whole=False), carry)
        pl.when(index == 0)(take_turn)

        sum_ = jnp.maximum(sum_, 1e-30)
        total /= lax.broadcast_in_dim(sum_, total.shape, [0])
        plgpu.commit_smem()  # all of the warpgroup is done with the queries
        rows[...] = jnp.where(self._query((ROWS, head_size), index) < work.num_queries, total, 0).astype(rows.dtype)
        for weight in weights:
            is_query = ((warpgroup.places() + index * ROWS) & (self.tiling.queries - 1)) < work.num_queries
            weight[...] = jnp.where(is_query, top + jnp.log2(sum_), LOWEST)  # a row that is no query may be NaN
        plgpu.commit_smem()
        for place in range(0, ROWS, self.piece):
            head, offset = _divmod(index * ROWS + place, self.tiling.queries)
            piece = work.first + lax.div(offset, self.piece)

            @pl.when(piece < work.end)
            def _write(place: int = place, head: Array = head, piece: Array = piece) -> None:
                plgpu.copy_smem_to_gmem(rows.at[pl.ds(place, self.piece)], out.at[self._tokens(piece), first_head + head])

        plgpu.wait_smem_to_gmem(0)

    def _tokens(self, piece: Array) -> Any:
        """Of q or the output. That they begin at a multiple is seen only where it is written as a product."""
        return pl.ds(piece * self.piece, self.piece)

    def _query(self, shape: tuple[int, int], index: Array) -> Array:
        """The query token of the tile that each row has."""
        return (self.warpgroup.iota(shape, 0) + index * ROWS) & (self.tiling.queries - 1)

    def _capped(self, scores: Array) -> tuple[Array, float]:
        """Scores, and what makes them exponents of 2."""
        if self.soft_cap is None:
            return scores, max(self.scale * LOG2_E, SMALLEST_FACTOR)
        return jnp.tanh(scores * (self.scale / self.soft_cap)), self.soft_cap * LOG2_E

    def _is_seen(self, position: Array, key: Array, index: Array) -> Array:
        """Which keys of a tile each row attends to."""
        shape = (ROWS, self.tiling.tokens)
        query, keys = self._query(shape, index) + position, self.warpgroup.iota(shape, 1) + key
        return keys <= query if self.span == EVERYTHING else (keys <= query) & (keys >= first_seen(self.span, query))

    def _clear(self, values: Any, work: Work, key: Array, index: Array, both: Any) -> None:
        """Zeros for values after the tile's last query, by both warpgroups together: a weight of 0 times NaN is NaN."""
        end = work.position + work.num_queries

        @pl.when(key + self.tiling.tokens > end)
        def _clear_values() -> None:
            for i, place in enumerate(range(0, self.tiling.tokens, ROWS)):

                @pl.when(index == i % WARPGROUPS)
                def _clear_rows(place: int = place) -> None:
                    rows = values.at[pl.ds(place, ROWS)]
                    position = self.warpgroup.iota(rows.shape, 0) + (key + place)
                    cleared = jnp.where(position < end, self.warpgroup.load(rows), 0)
                    plgpu.commit_smem()
                    rows[...] = cleared

            plgpu.commit_smem()
            plgpu.barrier_arrive(both)
            plgpu.barrier_wait(both)


def _divmod(a: Array, b: int) -> tuple[Array, Array]:
    return lax.div(a, b), lax.rem(a, b)
