"""One consumer warpgroup of paged_attention's kernel for GPUs: attention over its tiles as they arrive, with an online
softmax (FlashAttention, arXiv:2205.14135)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic.attention import INITIAL_MAX, LOG2_E, MASKED_SCORE, SMALLEST_FACTOR
from pallas_kernels.mosaic.in_place import broadcast_row
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup
from pallas_kernels.paged_attention.mosaic_new_token import NewToken
from pallas_kernels.paged_attention.mosaic_tiling import DecodeTiling
from pallas_kernels.span import FULL_ATTENTION, Span
from pallas_kernels.visibility import first_visible

# accumulated values, [ROWS, columns], and of the softmax its maximum and sum, [ROWS]
SoftmaxState = tuple[Array, Array, Array]


@dataclass(frozen=True)
class DecodeOptions:
    """What is the same for all blocks of a call."""

    num_queries: int  # of a KV head: those of all tokens, one token after the other
    num_tokens: int  # query tokens of a request: the last ones of its context
    value_size: int | None  # columns of latents that are values
    pool_is_finite: bool
    span: Span
    soft_cap: float | None


@dataclass(frozen=True)
class KVSplit:
    """The part of a context that one block attends over."""

    first: Array | int  # position that the first query attends from
    context: Array  # end of what the last query attends to among positions that lie in pages
    start: Array  # first tile
    num_tiles: Array

    @classmethod
    def for_block(cls, options: DecodeOptions, context: Array, split: Array, tiling: DecodeTiling, num_new: int) -> KVSplit:
        span = options.span
        first = first_visible(span, jnp.maximum(context - options.num_tokens, 0))
        first_tile = 0 if span == FULL_ATTENTION else lax.div(first, tiling.tokens)
        context = jnp.maximum(context - num_new, 0)
        num_tiles = _ceil_div(context, tiling.tokens) - first_tile
        for_block = _ceil_div(num_tiles, tiling.splits)
        start = split * for_block
        return cls(first, context, start + first_tile, jnp.maximum(jnp.minimum(start + for_block, num_tiles) - start, 0))


@dataclass(frozen=True)
class ConsumerWarpgroup:
    """A warpgroup that attends over tiles as they arrive: every `warpgroups`-th tile from `consumer_index` on, for its
    part of the result's columns. The first column part computes the scores and passes their weights to the others."""

    warpgroup: Warpgroup
    tiling: DecodeTiling
    options: DecodeOptions
    kv_split: KVSplit
    first_row: Array  # of the KV head's queries that it processes
    column_part: int
    num_column_parts: int
    consumer_index: int
    scale: Array
    new: NewToken | None

    def run(
        self,
        q: Any,
        out: Any,
        weight: Any,
        *,
        q_tile: Any,
        weight_tile: Any,
        softmaxes: Any,
        keys_or_totals_or_out: Any,
        values: Any,
        wide: Any,
        q_arrival: Any,
        arrivals: Any,
        consumed: Any,
        done: Any,
        handed_over: Any,
        weight_exchange: Any,
    ) -> None:
        plgpu.set_max_registers(232, action="increase")
        keys, totals, out_tile = keys_or_totals_or_out
        size, num_consumers = out.shape[-1] // self.num_column_parts, self.tiling.warpgroups
        columns, rows = pl.ds(self.column_part * size, size), pl.ds(0, q.shape[0])
        if self.column_part == self.consumer_index == 0:
            plgpu.copy_gmem_to_smem(q, q_tile.at[rows], q_arrival)
        # While the queries are in flight.
        new = None if self.new is None or self.consumer_index > 0 else self.new.write(self.warpgroup)
        plgpu.barrier_wait(q_arrival)
        start = self._initial_state(size, q_tile, new)
        if self.column_part > 0:
            sums = self._apply_shared_weights(start, columns, keys, arrivals, consumed, weight_exchange)
        else:
            sums = self._attend(
                start, columns, q_tile, keys, values, [w.at[self.consumer_index] for w in wide], arrivals, consumed, weight_exchange
            )
            if self.num_column_parts > 1:
                softmaxes[1, 0] = sums[2]
                plgpu.commit_smem()
        if self.num_column_parts * num_consumers > 1:  # the others may still read the keys that totals overwrite
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
        if self.column_part > 0:
            sums = sums[0], sums[1], self.warpgroup.load(softmaxes.at[1, 0])
        if self.consumer_index > 0:
            totals[self.consumer_index - 1], softmaxes[0, self.consumer_index], softmaxes[1, self.consumer_index] = sums
            plgpu.commit_smem()
            plgpu.barrier_arrive(handed_over)
            return
        if num_consumers > 1:
            plgpu.barrier_wait(handed_over)
            for other in range(1, num_consumers):
                sums = self._merge(sums, (totals.at[other - 1], softmaxes.at[0, other], softmaxes.at[1, other]))
            plgpu.commit_smem()  # all of the warpgroup has read what the result overwrites
        total, top, sum_ = sums
        sum_ = jnp.maximum(sum_, 1e-30)
        total /= lax.broadcast_in_dim(sum_, total.shape, [0])
        out_tile[self.column_part] = total.astype(out_tile.dtype)
        if self.column_part == 0:
            weight_tile[...] = top + jnp.log2(sum_)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[self.column_part, pl.ds(0, out.shape[0])], out.at[:, columns])
        if self.column_part == 0:
            plgpu.copy_smem_to_gmem(weight_tile, weight)
        plgpu.wait_smem_to_gmem(0)

    def _initial_state(self, size: int, q_tile: Any, new: tuple[Array, Array] | None) -> SoftmaxState:
        """The state before the first tile: empty, or the new token where the block attends to it."""
        warpgroup = self.warpgroup
        empty = warpgroup.full((ROWS, size), 0.0), warpgroup.full((ROWS,), INITIAL_MAX), warpgroup.full((ROWS,), 0.0)
        if new is None or self.new is None:
            return empty
        key, value = (broadcast_row(warpgroup, row, ROWS) for row in new)
        score, factor = self._apply_soft_cap((warpgroup.load(q_tile).astype(jnp.float32) * key).sum(axis=1))
        token = value, score * factor, warpgroup.full((ROWS,), 1.0)
        total, top, sum_ = (jnp.where(self.new.is_attended, a, b) for a, b in zip(token, empty, strict=True))
        return total, top, sum_

    def _attend(
        self,
        start: SoftmaxState,
        columns: Any,
        q_tile: Any,
        keys: Any,
        values: Any,
        wide: Any,
        arrivals: Any,
        consumed: Any,
        weight_exchange: Any,
    ) -> SoftmaxState:
        """Attends over its own tiles."""
        warpgroup, tiling = self.warpgroup, self.tiling
        tokens, num_consumers = tiling.tokens, tiling.warpgroups

        def one(i: Array, carry: SoftmaxState) -> SoftmaxState:
            total, top, sum_ = carry
            tile = i * num_consumers + self.consumer_index
            stage, position = lax.rem(tile, tiling.stages), (self.kv_split.start + tile) * tokens
            plgpu.barrier_wait(arrivals[0].at[stage])
            key_tile = self._widen(keys.at[stage], wide[0]) if wide else keys.at[stage]
            scores, factor = self._apply_soft_cap(warpgroup.times_transposed((q_tile, key_tile)))
            if values:
                plgpu.barrier_arrive(consumed[0].at[stage])
            scores = lax.cond(
                self._needs_mask(position, tokens), lambda scores: self._mask(scores, position), lambda scores: scores, scores
            )
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            rescale = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sum_ = sum_ * rescale + weights.sum(axis=1)
            weights = weights.astype(q_tile.dtype)
            if weight_exchange:
                weight_exchange[0][stage], self._weights(keys, stage, weight_exchange)[...] = rescale, weights
                plgpu.commit_smem()
                plgpu.barrier_arrive(weight_exchange[1].at[stage])
            total = total * lax.broadcast_in_dim(rescale, total.shape, [0])
            if values:
                plgpu.barrier_wait(arrivals[1].at[stage])
            value_tile = values[0].at[stage] if values else keys.at[stage, :, columns]
            if wide:
                value_tile = self._widen(value_tile, wide[1])
            if not self.options.pool_is_finite:
                self._clear(value_tile, position)
            total = warpgroup.add_product(total, weights, value_tile)
            plgpu.barrier_arrive(consumed[-1].at[stage])
            return total, new_top, sum_

        return lax.fori_loop(0, lax.div(self.kv_split.num_tiles + (num_consumers - 1 - self.consumer_index), num_consumers), one, start)

    def _apply_shared_weights(
        self, start: SoftmaxState, columns: Any, keys: Any, arrivals: Any, consumed: Any, weight_exchange: Any
    ) -> SoftmaxState:
        """Attends over all tiles, with the weights that the first column part passes on."""

        def one(i: Array, total: Array) -> Array:
            stage = lax.rem(i, self.tiling.stages)
            plgpu.barrier_wait(arrivals[0].at[stage])
            value_tile = keys.at[stage, :, columns]
            # the scores are done: their product reads these columns too
            plgpu.barrier_wait(weight_exchange[1].at[stage])
            if not self.options.pool_is_finite:
                self._clear(value_tile, (self.kv_split.start + i) * self.tiling.tokens)
            total = total * lax.broadcast_in_dim(self.warpgroup.load(weight_exchange[0].at[stage]), total.shape, [0])
            total = self.warpgroup.add_product(total, self._weights(keys, stage, weight_exchange), value_tile)
            plgpu.barrier_arrive(consumed[-1].at[stage])
            return total

        total, top, sum_ = start
        return lax.fori_loop(0, self.kv_split.num_tiles, one, total), top, sum_

    def _weights(self, keys: Any, stage: Array, weight_exchange: Any) -> Any:
        """Where a tile's weights are passed on."""
        if len(weight_exchange) > 2:
            return weight_exchange[2].at[stage]
        return keys.at[stage, :, pl.ds(self.options.value_size or 0, self.tiling.tokens)]

    def _merge(self, sums: SoftmaxState, others: tuple[Any, Any, Any]) -> SoftmaxState:
        """The states of two warpgroups as one, as if one had had all tiles."""
        total, top, sum_ = sums
        other_total, other_top, other_sum = (self.warpgroup.load(ref) for ref in others)
        new_top = jnp.maximum(top, other_top)
        rescale, other_rescale = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
        total = total * lax.broadcast_in_dim(rescale, total.shape, [0])
        total += other_total * lax.broadcast_in_dim(other_rescale, total.shape, [0])
        return total, new_top, sum_ * rescale + other_sum * other_rescale

    def _apply_soft_cap(self, products: Array) -> tuple[Array, Array | float]:
        """Scores, and the factor that makes them exponents of 2. A float8 pool's keys may be scaled by 0."""
        if self.options.soft_cap is None:
            return products, jnp.maximum(self.scale * LOG2_E, SMALLEST_FACTOR)
        return jnp.tanh(products * (self.scale / self.options.soft_cap)), self.options.soft_cap * LOG2_E

    def _needs_mask(self, position: Array, tokens: int) -> Array:
        """Whether some query doesn't see all of a tile that begins at this position: most tiles need no mask."""
        context, num_tokens, span = self.kv_split.context, self.options.num_tokens, self.options.span
        needs_mask = position + tokens > jnp.maximum(context - num_tokens, 0) + 1
        if span == FULL_ATTENTION:
            return needs_mask
        return needs_mask | (position < (self.kv_split.first if num_tokens == 1 else first_visible(span, context - 1)))

    def _mask(self, scores: Array, position: Array) -> Array:
        """Scores with those masked that a query doesn't see."""
        return jnp.where(self._is_visible(self.warpgroup.iota((ROWS, scores.shape[1]), 1), position), scores, MASKED_SCORE)

    # What is the same for a whole tile is on one side of a comparison, as a scalar. Added to every element it would
    # need registers, which ptxas then spills.

    def _is_visible(self, place: Array, position: Array) -> Array:
        """Which tokens of a tile that begins at this position each row's query attends to, by their index in it."""
        if self.options.num_tokens == 1:
            return self._is_visible_to_any(place, position)
        token = lax.div(self.warpgroup.row_indices() + self.first_row, self.options.num_queries // self.options.num_tokens)
        own = token + (self.kv_split.context - self.options.num_tokens)
        is_past = place <= lax.broadcast_in_dim(own - position, place.shape, [0])
        if self.options.span == FULL_ATTENTION:
            return is_past
        first = first_visible(self.options.span, own) - position
        return is_past & (place >= lax.broadcast_in_dim(first, place.shape, [0]))

    def _is_visible_to_any(self, place: Array, position: Array) -> Array:
        """Which of them any query attends to."""
        is_before_end = place < self.kv_split.context - position
        return is_before_end if self.options.span == FULL_ATTENTION else (place >= self.kv_split.first - position) & is_before_end

    def _clear(self, values: Any, position: Array) -> None:
        """Clears values whose weight is 0: 0 times NaN is NaN."""
        needs_mask = position + values.shape[0] > self.kv_split.context

        @pl.when(needs_mask if self.options.span == FULL_ATTENTION else needs_mask | (position < self.kv_split.first))
        def _clear_values() -> None:
            is_visible_to_any = self._is_visible_to_any(self.warpgroup.iota(values.shape, 0), position)
            values[...] = jnp.where(is_visible_to_any, self.warpgroup.load(values), 0)
            plgpu.commit_smem()

    def _widen(self, tile: Any, wide: Any) -> Any:
        """A tile of float8 in the type of the products."""
        wide[...] = self.warpgroup.load_to_widen(tile).astype(wide.dtype)
        plgpu.commit_smem()
        return wide


def _ceil_div(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), b)
