"""The kernel of prefill attention on NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU, over keys and values wherever they lie.

A block of threads has a tile of 128 rows: query tokens of one request, of one or of several query heads that share a KV head. One
warpgroup has the copy engine bring tiles of keys and values from their context, several ahead; two others, of 64 rows each, multiply and keep
an online softmax (FlashAttention, arXiv:2205.14135), and take turns: while one has the tensor cores, the other has its softmax
(FlashAttention-3, arXiv:2407.08608). Which tokens and which tiles of context a block has is worked out before, by XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic.attention import LOG2_E, LOWEST, NOTHING, SMALLEST_FACTOR, drain, wait_if
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup, compiler_params, interleaved
from pallas_kernels.ragged_prefill_attention.mosaic_work import TILE_ROWS, WARPGROUPS, Tiling, Work, share_of
from pallas_kernels.seen import first_seen
from pallas_kernels.span import FULL_ATTENTION, Span


class Context(Protocol):
    """Where keys and values lie, in runs of tokens that are copied at once."""

    @property
    def run(self) -> int:
        """Tokens of a run."""

    @property
    def key_sizes(self) -> tuple[int, ...]:
        """Columns of a key, by where they lie."""

    @property
    def value_size(self) -> int:
        """Columns of a value: as many as the first of a key's."""

    @property
    def ends_early(self) -> bool:
        """Whether keys may end before the last query's own."""

    @property
    def operands(self) -> tuple[Array, ...]:
        """The kernel's, of which it makes references to global memory."""

    def place(self, refs: Sequence[Any], work: Work, run: Array) -> Any:
        """Where a run of a tile's context is."""

    def sides(self, refs: Sequence[Any], place: Any, head: Array, num_heads: int) -> tuple[list[Any], list[Any]]:
        """The run there of what a query head, of so many, attends to: its keys, [run, size] of each size, and its values, of theirs."""


@dataclass(frozen=True)
class Kernel:
    """Of everything that is known when it is compiled."""

    warpgroup: Warpgroup
    tiling: Tiling
    splits: int  # shares of each tile's context
    piece: int  # query tokens that are copied at once
    scale: float
    pool_is_finite: bool
    span: Span = FULL_ATTENTION
    soft_cap: float | None = None
    is_part: bool = False  # of a context, so that what rows weigh is wanted

    def call(
        self, q: Float[Array, "T N H"], context: Context, dtype: jnp.dtype, work: Work
    ) -> tuple[Float[Array, "S T N V"], Float[Array, "S M X R"] | None]:
        """Of each share the result, and where they are several, or parts of a context, what the rows of each tile weigh: the log2 of the
        softmax's denominator, by M groups of heads and X tiles."""
        num_tokens, num_heads, _ = q.shape
        num_groups, num_tiles = num_heads // self.tiling.heads, len(work.first)
        weights = jax.ShapeDtypeStruct((self.splits, num_groups, num_tiles, TILE_ROWS), jnp.float32)
        tiling, num_runs, operands = self.tiling, self.tiling.tokens // context.run, context.operands

        def tile(rows: tuple[int, int], size: int) -> Any:
            return plgpu.SMEM((*rows, size), dtype, transforms=interleaved(size, dtype))

        def arrivals(num_copies: int) -> Any:
            return plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=num_runs * num_copies)

        consumed = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=WARPGROUPS)
        kernel = self.warpgroup.kernel(
            lambda q, work, *refs, **scratch: self._kernel(context, q, work, refs[: len(operands)], *refs[len(operands) :], **scratch),
            "ragged_prefill_attention",
            out_type=[
                jax.ShapeDtypeStruct((self.splits, num_tokens, num_heads, context.value_size), dtype),
                *([weights] if self._has_weights else []),
            ],
            grid=(num_groups, num_tiles, self.splits),
            grid_names=("heads", "tile", "share"),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            scratch_types={
                "queries_or_out": tuple(tile((WARPGROUPS, ROWS), size) for size in context.key_sizes),
                "keys": tuple(tile((tiling.stages, tiling.tokens), size) for size in context.key_sizes),
                "values": tile((tiling.stages, tiling.tokens), context.value_size),
                "q_arrival": plgpu.Barrier(num_arrivals=TILE_ROWS // self.piece * len(context.key_sizes)),
                "arrivals": (arrivals(len(context.key_sizes)), arrivals(1)),
                "consumed": (consumed, consumed),
                "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
                "cleared": plgpu.Barrier(num_arrivals=WARPGROUPS),
            },
            # Without barriers around every copy: where a warpgroup writes what it reads, it says so itself.
            compiler_params=compiler_params(approx_math=True, has_auto_barriers=False),
        )
        out, *weighed = kernel(q.astype(dtype), jnp.stack(work, axis=1), *operands)
        return out, weighed[0] if weighed else None

    @property
    def _has_weights(self) -> bool:
        return self.splits > 1 or self.is_part

    def _kernel(self, context: Context, q: Any, work: Any, operands: Sequence[Any], out: Any, *weights: Any, **scratch: Any) -> None:
        # The last tiles of a prompt have the most to do: they come first.
        tile = work.shape[0] - 1 - lax.axis_index("tile")
        of_tile = Work(*(work[tile, i] for i in range(len(Work._fields))))
        share, index = lax.axis_index("share"), lax.axis_index("warpgroup")
        if self.splits > 1:
            of_tile = share_of(of_tile, share, self.splits, self.tiling.tokens, context.run)
        first_head = lax.axis_index("heads") * self.tiling.heads

        @pl.when(index < WARPGROUPS)
        def _attend() -> None:
            plgpu.set_max_registers(232, action="increase")
            rows = [weight.at[share, lax.axis_index("heads"), tile, pl.ds(pl.multiple_of(index * ROWS, ROWS), ROWS)] for weight in weights]
            self._attend(context, out.at[share], rows, of_tile, first_head, index, **scratch)

        @pl.when(index == WARPGROUPS)
        def _fetch() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self._fetch_queries(q, of_tile, first_head, **scratch)
            self._fetch(context, operands, of_tile, first_head, q.shape[1], **scratch)

    def _fetch_queries(self, q: Any, work: Work, first_head: Array, *, queries_or_out: Any, q_arrival: Any, **_: Any) -> None:
        """Bring the tile of queries; past the last token any others will do."""
        sizes = [part.shape[-1] for part in queries_or_out]
        for place in range(0, TILE_ROWS, self.piece):
            head, offset = divmod(place, self.tiling.queries)
            piece = jnp.minimum(work.first + offset // self.piece, q.shape[0] // self.piece - 1)
            source = q.at[self._tokens(piece), first_head + head]
            for part, size, end in zip(queries_or_out, sizes, accumulate(sizes), strict=True):
                columns = source if len(sizes) == 1 else source.at[:, pl.ds(end - size, size)]
                plgpu.copy_gmem_to_smem(columns, part.at[place // ROWS, pl.ds(place % ROWS, self.piece)], q_arrival)

    def _fetch(
        self,
        context: Context,
        operands: Sequence[Any],
        work: Work,
        head: Array,
        num_heads: int,
        *,
        keys: Any,
        values: Any,
        arrivals: Any,
        consumed: Any,
        **_: Any,
    ) -> None:
        """Bring the tiles of keys and values, as many ahead as there are stages."""
        run, stages = context.run, self.tiling.stages
        num_runs = self.tiling.tokens // run

        def fetch(i: Array, _: None) -> None:
            stage = lax.rem(i, stages)
            # Past the context the last run comes again: nothing else is known to be this request's.
            runs = [jnp.minimum(work.start + i * num_runs + j, lax.div(work.last, run)) for j in range(num_runs)]
            places = [context.place(operands, work, run) for run in runs]
            for side in range(2):
                wait_if(i >= stages, consumed[side].at[stage])
                for j, place in enumerate(places):
                    sources = context.sides(operands, place, head, num_heads)[side]
                    for source, tile in zip(sources, (keys, (values,))[side], strict=True):
                        plgpu.copy_gmem_to_smem(source, tile.at[stage, pl.ds(j * run, run)], arrivals[side].at[stage])

        lax.fori_loop(0, work.num_tiles, fetch, None)
        drain(consumed, work.num_tiles, stages)

    def _attend(
        self,
        context: Context,
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
        warpgroup, tokens, rows = self.warpgroup, self.tiling.tokens, [part.at[index] for part in queries_or_out]
        plgpu.barrier_wait(q_arrival)

        def take_turn() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def one(i: Array, carry: tuple[Array, Array, Array], *, is_whole: bool) -> tuple[Array, Array, Array]:
            total, top, sum_ = carry
            stage = lax.rem(i, self.tiling.stages)
            plgpu.barrier_wait(arrivals[0].at[stage])
            factors = [(part, tile.at[stage]) for part, tile in zip(rows, keys, strict=True)]
            scores, factor = self._capped(warpgroup.times_transposed(*factors, meanwhile=take_turn))
            plgpu.barrier_arrive(consumed[0].at[stage])
            key = work.start * context.run + i * tokens
            if not is_whole:
                scores = jnp.where(self._is_seen(work, key, index, context.ends_early), scores, NOTHING)
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sum_ = sum_ * shrink + weights.sum(axis=1)
            total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
            # The softmax comes before the other's turn in what ptxas is given. It moves the arrival before it: the other may begin its own softmax
            # at once, and the order of the products stays.
            total, sum_, top, weights = lax.optimization_barrier((total, sum_, new_top, weights.astype(values.dtype)))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(arrivals[1].at[stage])
            if not is_whole and not self.pool_is_finite:
                self._clear(values.at[stage], work, key, index, cleared)
            plgpu.barrier_wait(turn)
            total = warpgroup.add_product(total, weights, values.at[stage])
            plgpu.barrier_arrive(consumed[1].at[stage])
            return total, top, sum_

        pl.when(index == 1)(take_turn)  # half a tile behind the other
        shape = ROWS, context.value_size
        carry = warpgroup.full(shape, 0.0), warpgroup.full((ROWS,), LOWEST), warpgroup.full((ROWS,), 0.0)
        if self.span != FULL_ATTENTION:
            carry = lax.fori_loop(0, work.whole, lambda i, carry: one(i, carry, is_whole=False), carry)
        carry = lax.fori_loop(work.whole, work.edge, lambda i, carry: one(i, carry, is_whole=True), carry)
        total, top, sum_ = lax.fori_loop(work.edge, work.num_tiles, lambda i, carry: one(i, carry, is_whole=False), carry)
        pl.when(index == 0)(take_turn)

        sum_ = jnp.maximum(sum_, 1e-30)
        total /= lax.broadcast_in_dim(sum_, total.shape, [0])
        plgpu.commit_smem()  # all of the warpgroup is done with the queries
        result = rows[0]
        result[...] = jnp.where(self._query(shape, index) < work.num_queries, total, 0).astype(result.dtype)
        for weight in weights:
            is_query = ((warpgroup.places() + index * ROWS) & (self.tiling.queries - 1)) < work.num_queries
            weight[...] = jnp.where(is_query, top + jnp.log2(sum_), LOWEST)  # a row that is no query may be NaN
        plgpu.commit_smem()
        for place in range(0, ROWS, self.piece):
            head, offset = _divmod(index * ROWS + place, self.tiling.queries)
            piece = work.first + lax.div(offset, self.piece)

            @pl.when(piece < work.end)
            def _write(place: int = place, head: Array = head, piece: Array = piece) -> None:
                plgpu.copy_smem_to_gmem(result.at[pl.ds(place, self.piece)], out.at[self._tokens(piece), first_head + head])

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

    def _is_seen(self, work: Work, key: Array, index: Array, ends_early: bool) -> Array:
        """Which keys of a tile each row attends to."""
        shape = (ROWS, self.tiling.tokens)
        query, keys = self._query(shape, index) + work.position, self.warpgroup.iota(shape, 1) + key
        last = jnp.minimum(query, work.last) if ends_early else query
        return keys <= last if self.span == FULL_ATTENTION else (keys <= last) & (keys >= first_seen(self.span, query))

    def _clear(self, values: Any, work: Work, key: Array, index: Array, both: Any) -> None:
        """Zeros for values after the last that is seen, by both warpgroups together: a weight of 0 times NaN is NaN."""

        @pl.when(key + self.tiling.tokens > work.last + 1)
        def _clear_values() -> None:
            for i, place in enumerate(range(0, self.tiling.tokens, ROWS)):

                @pl.when(index == i % WARPGROUPS)
                def _clear_rows(place: int = place) -> None:
                    rows = values.at[pl.ds(place, ROWS)]
                    position = self.warpgroup.iota(rows.shape, 0) + (key + place)
                    cleared = jnp.where(position <= work.last, self.warpgroup.load(rows), 0)
                    plgpu.commit_smem()
                    rows[...] = cleared

            plgpu.commit_smem()
            plgpu.barrier_arrive(both)
            plgpu.barrier_wait(both)


def _divmod(a: Array, b: int) -> tuple[Array, Array]:
    return lax.div(a, b), lax.rem(a, b)
