"""The kernel of prefill attention on NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU, over any source of keys and
values.

A thread block has a tile of 128 rows: query tokens of one request, of one or of several query heads that share a KV
head. One producer warpgroup has the copy engine fetch tiles of keys and values from their context, several ahead. Two
consumer warpgroups, of 64 rows each, multiply and keep an online softmax (FlashAttention, arXiv:2205.14135). They
alternate: while one uses the tensor cores, the other computes its softmax (FlashAttention-3, arXiv:2407.08608). XLA
works out beforehand which tokens and which tiles of context a block has.
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

from pallas_kernels.mosaic.attention import INITIAL_MAX, LOG2_E, MASKED_SCORE, SMALLEST_FACTOR, drain, wait_if
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup, compiler_params, interleaved
from pallas_kernels.ragged_prefill_attention.mosaic_tile_work import TILE_ROWS, WARPGROUPS, PrefillTiling, TileWork, split_work
from pallas_kernels.span import FULL_ATTENTION, Span
from pallas_kernels.visibility import first_visible


class KVSource(Protocol):
    """A source of keys and values, in runs of tokens that are copied at once."""

    @property
    def run(self) -> int:
        """Tokens of a run."""

    @property
    def key_sizes(self) -> tuple[int, ...]:
        """Columns of a key, by where they are stored."""

    @property
    def value_size(self) -> int:
        """Columns of a value: as many as the first of a key's."""

    @property
    def ends_early(self) -> bool:
        """Whether keys may end before the last query's own."""

    @property
    def operands(self) -> tuple[Array, ...]:
        """The arrays that the kernel gets as references to global memory."""

    def locate(self, refs: Sequence[Any], work: TileWork, run: Array) -> Any:
        """Where a run of a tile's context is stored."""

    def keys_and_values(self, refs: Sequence[Any], place: Any, head: Array, num_heads: int) -> tuple[list[Any], list[Any]]:
        """The run at `place` that a query head, of `num_heads`, attends to: its keys, [run, size] for each of
        `key_sizes`, and its values."""


@dataclass(frozen=True)
class PrefillKernel:
    """The kernel, with everything that is known at compile time."""

    warpgroup: Warpgroup
    tiling: PrefillTiling
    splits: int  # KV splits of each tile's context
    piece: int  # query tokens that are copied at once
    scale: float
    pool_is_finite: bool
    span: Span = FULL_ATTENTION
    soft_cap: float | None = None
    is_partial_context: bool = False  # whether the context is one of several runs, so that the rows' weights are needed

    def call(
        self, q: Float[Array, "T N H"], context: KVSource, dtype: jnp.dtype, work: TileWork
    ) -> tuple[Float[Array, "S T N V"], Float[Array, "S M X R"] | None]:
        """The results by split. Where there are several splits, or the context is partial, also the weights of the rows
        of each tile: the log2 of the softmax's denominator, by M groups of heads and X tiles."""
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
            grid_names=("heads", "tile", "split"),
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
            # Without barriers around every copy: a warpgroup that writes what it reads orders that itself.
            compiler_params=compiler_params(approx_math=True, has_auto_barriers=False),
        )
        out, *row_weights = kernel(q.astype(dtype), jnp.stack(work, axis=1), *operands)
        return out, row_weights[0] if row_weights else None

    @property
    def _has_weights(self) -> bool:
        return self.splits > 1 or self.is_partial_context

    def _kernel(self, context: KVSource, q: Any, work: Any, operands: Sequence[Any], out: Any, *weights: Any, **scratch: Any) -> None:
        # The last tiles of a prompt have the most work: they come first.
        tile = work.shape[0] - 1 - lax.axis_index("tile")
        work_of_tile = TileWork(*(work[tile, i] for i in range(len(TileWork._fields))))
        split, index = lax.axis_index("split"), lax.axis_index("warpgroup")
        if self.splits > 1:
            work_of_tile = split_work(work_of_tile, split, self.splits, self.tiling.tokens, context.run)
        first_head = lax.axis_index("heads") * self.tiling.heads

        @pl.when(index < WARPGROUPS)
        def _attend() -> None:
            plgpu.set_max_registers(232, action="increase")
            rows = [weight.at[split, lax.axis_index("heads"), tile, pl.ds(pl.multiple_of(index * ROWS, ROWS), ROWS)] for weight in weights]
            self._attend(context, out.at[split], rows, work_of_tile, first_head, index, **scratch)

        @pl.when(index == WARPGROUPS)
        def _fetch() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self._fetch_queries(q, work_of_tile, first_head, **scratch)
            self._fetch(context, operands, work_of_tile, first_head, q.shape[1], **scratch)

    def _fetch_queries(self, q: Any, work: TileWork, first_head: Array, *, queries_or_out: Any, q_arrival: Any, **_: Any) -> None:
        """Fetches the tile of queries; past the last token any others will do."""
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
        context: KVSource,
        operands: Sequence[Any],
        work: TileWork,
        head: Array,
        num_heads: int,
        *,
        keys: Any,
        values: Any,
        arrivals: Any,
        consumed: Any,
        **_: Any,
    ) -> None:
        """Fetches the tiles of keys and values, as many ahead as there are stages."""
        run, stages = context.run, self.tiling.stages
        num_runs = self.tiling.tokens // run

        def fetch(i: Array, _: None) -> None:
            stage = lax.rem(i, stages)
            # Past the context the last run is fetched again: nothing else is known to belong to this request.
            runs = [jnp.minimum(work.start + i * num_runs + j, lax.div(work.last, run)) for j in range(num_runs)]
            places = [context.locate(operands, work, run) for run in runs]
            for side in range(2):
                wait_if(i >= stages, consumed[side].at[stage])
                for j, place in enumerate(places):
                    sources = context.keys_and_values(operands, place, head, num_heads)[side]
                    for source, tile in zip(sources, (keys, (values,))[side], strict=True):
                        plgpu.copy_gmem_to_smem(source, tile.at[stage, pl.ds(j * run, run)], arrivals[side].at[stage])

        lax.fori_loop(0, work.num_tiles, fetch, None)
        drain(consumed, work.num_tiles, stages)

    def _attend(
        self,
        context: KVSource,
        out: Any,
        weights: Sequence[Any],
        work: TileWork,
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
        """Attends with one warpgroup's rows over the tiles as they arrive."""
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
            scores, factor = self._apply_soft_cap(warpgroup.times_transposed(*factors, meanwhile=take_turn))
            plgpu.barrier_arrive(consumed[0].at[stage])
            key = work.start * context.run + i * tokens
            if not is_whole:
                scores = jnp.where(self._is_visible(work, key, index, context.ends_early), scores, MASKED_SCORE)
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            rescale = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sum_ = sum_ * rescale + weights.sum(axis=1)
            total = total * lax.broadcast_in_dim(rescale, total.shape, [0])
            # In the order that ptxas is given, the softmax comes before the other warpgroup's products. It moves the
            # barrier's arrival before the softmax: the other may begin its own softmax at once, and the order of the
            # products stays.
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
        carry = warpgroup.full(shape, 0.0), warpgroup.full((ROWS,), INITIAL_MAX), warpgroup.full((ROWS,), 0.0)
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
            is_query = ((warpgroup.row_indices() + index * ROWS) & (self.tiling.queries - 1)) < work.num_queries
            weight[...] = jnp.where(is_query, top + jnp.log2(sum_), INITIAL_MAX)  # a row without a query may be NaN
        plgpu.commit_smem()
        for place in range(0, ROWS, self.piece):
            head, offset = _divmod(index * ROWS + place, self.tiling.queries)
            piece = work.first + lax.div(offset, self.piece)

            @pl.when(piece < work.end)
            def _write(place: int = place, head: Array = head, piece: Array = piece) -> None:
                plgpu.copy_smem_to_gmem(result.at[pl.ds(place, self.piece)], out.at[self._tokens(piece), first_head + head])

        plgpu.wait_smem_to_gmem(0)

    def _tokens(self, piece: Array) -> Any:
        """Tokens of q or the output. The compiler sees that they begin at a multiple only where it is written as a
        product."""
        return pl.ds(piece * self.piece, self.piece)

    def _query(self, shape: tuple[int, int], index: Array) -> Array:
        """The query token of each row of the tile."""
        return (self.warpgroup.iota(shape, 0) + index * ROWS) & (self.tiling.queries - 1)

    def _apply_soft_cap(self, scores: Array) -> tuple[Array, float]:
        """Scores, and the factor that makes them exponents of 2."""
        if self.soft_cap is None:
            return scores, max(self.scale * LOG2_E, SMALLEST_FACTOR)
        return jnp.tanh(scores * (self.scale / self.soft_cap)), self.soft_cap * LOG2_E

    def _is_visible(self, work: TileWork, key: Array, index: Array, ends_early: bool) -> Array:
        """Which keys of a tile each row attends to."""
        shape = (ROWS, self.tiling.tokens)
        query, keys = self._query(shape, index) + work.position, self.warpgroup.iota(shape, 1) + key
        last = jnp.minimum(query, work.last) if ends_early else query
        return keys <= last if self.span == FULL_ATTENTION else (keys <= last) & (keys >= first_visible(self.span, query))

    def _clear(self, values: Any, work: TileWork, key: Array, index: Array, both: Any) -> None:
        """Clears values after the last visible one, by both warpgroups together: a weight of 0 times NaN is NaN."""

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
