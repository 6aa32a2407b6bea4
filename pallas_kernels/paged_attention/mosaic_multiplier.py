"""One warpgroup of paged_attention's kernel for GPUs: attention over the tiles of its turns as they come, with an online softmax
(FlashAttention, arXiv:2205.14135)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic.attention import LOG2_E, LOWEST, NOTHING, SMALLEST_FACTOR
from pallas_kernels.mosaic.in_place import spread
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup
from pallas_kernels.paged_attention.mosaic_new_token import NewToken
from pallas_kernels.paged_attention.mosaic_tiling import Tiling
from pallas_kernels.seen import first_seen
from pallas_kernels.span import FULL_ATTENTION, Span

Sums = tuple[Array, Array, Array]  # of values, [ROWS, columns], and of the softmax its maximum and sum, [ROWS]


@dataclass(frozen=True)
class Options:
    """What a call asks for."""

    num_queries: int  # of a KV head: those of all tokens, one token after the other
    num_tokens: int  # that a request has queries of: the last of its context
    value_size: int | None  # columns of latents that are values
    pool_is_finite: bool
    span: Span
    soft_cap: float | None


@dataclass(frozen=True)
class Part:
    """A block's share of a context."""

    first: Array | int  # position that the first token attends to
    context: Array  # positions before which the last one does, of those that lie in pages
    start: Array  # tile
    num_tiles: Array

    @classmethod
    def of_share(cls, options: Options, context: Array, share: Array, tiling: Tiling, num_new: int) -> Part:
        span = options.span
        first = first_seen(span, jnp.maximum(context - options.num_tokens, 0))
        first_tile = 0 if span == FULL_ATTENTION else lax.div(first, tiling.tokens)
        context = jnp.maximum(context - num_new, 0)
        num_tiles = _ceil_div(context, tiling.tokens) - first_tile
        of_share = _ceil_div(num_tiles, tiling.splits)
        start = share * of_share
        return cls(first, context, start + first_tile, jnp.maximum(jnp.minimum(start + of_share, num_tiles) - start, 0))


@dataclass(frozen=True)
class Multiplier:
    """A warpgroup that attends over tiles as they come: over those of its turns, for its part of the result's columns. The first part has the scores,
    and hands what they weigh to the others."""

    warpgroup: Warpgroup
    tiling: Tiling
    options: Options
    part: Part
    first_row: Array  # of the KV head's queries that it has
    index: int
    num_parts: int
    turn: int
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
        weighed: Any,
    ) -> None:
        plgpu.set_max_registers(232, action="increase")
        keys, totals, out_tile = keys_or_totals_or_out
        size, turns = out.shape[-1] // self.num_parts, self.tiling.warpgroups
        columns, rows = pl.ds(self.index * size, size), pl.ds(0, q.shape[0])
        if self.index == self.turn == 0:
            plgpu.copy_gmem_to_smem(q, q_tile.at[rows], q_arrival)
        # While the queries are on their way.
        new = None if self.new is None or self.turn > 0 else self.new.write(self.warpgroup)
        plgpu.barrier_wait(q_arrival)
        start = self._start(size, q_tile, new)
        if self.index > 0:
            sums = self._follow(start, columns, keys, arrivals, consumed, weighed)
        else:
            sums = self._attend(start, columns, q_tile, keys, values, [w.at[self.turn] for w in wide], arrivals, consumed, weighed)
            if self.num_parts > 1:
                softmaxes[1, 0] = sums[2]
                plgpu.commit_smem()
        if self.num_parts * turns > 1:  # the others may still read the keys that totals are written over
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
        if self.index > 0:
            sums = sums[0], sums[1], self.warpgroup.load(softmaxes.at[1, 0])
        if self.turn > 0:
            totals[self.turn - 1], softmaxes[0, self.turn], softmaxes[1, self.turn] = sums
            plgpu.commit_smem()
            plgpu.barrier_arrive(handed_over)
            return
        if turns > 1:
            plgpu.barrier_wait(handed_over)
            for other in range(1, turns):
                sums = self._both(sums, (totals.at[other - 1], softmaxes.at[0, other], softmaxes.at[1, other]))
            plgpu.commit_smem()  # all of the warpgroup has read what the result is written over
        total, top, sum_ = sums
        sum_ = jnp.maximum(sum_, 1e-30)
        total /= lax.broadcast_in_dim(sum_, total.shape, [0])
        out_tile[self.index] = total.astype(out_tile.dtype)
        if self.index == 0:
            weight_tile[...] = top + jnp.log2(sum_)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[self.index, pl.ds(0, out.shape[0])], out.at[:, columns])
        if self.index == 0:
            plgpu.copy_smem_to_gmem(weight_tile, weight)
        plgpu.wait_smem_to_gmem(0)

    def _start(self, size: int, q_tile: Any, new: tuple[Array, Array] | None) -> Sums:
        """What there is before the first tile: nothing, or the new token where the block attends to it."""
        warpgroup = self.warpgroup
        nothing = warpgroup.full((ROWS, size), 0.0), warpgroup.full((ROWS,), LOWEST), warpgroup.full((ROWS,), 0.0)
        if new is None or self.new is None:
            return nothing
        key, value = (spread(warpgroup, row, ROWS) for row in new)
        score, factor = self._capped((warpgroup.load(q_tile).astype(jnp.float32) * key).sum(axis=1))
        token = value, score * factor, warpgroup.full((ROWS,), 1.0)
        total, top, sum_ = (jnp.where(self.new.is_here, a, b) for a, b in zip(token, nothing, strict=True))
        return total, top, sum_

    def _attend(
        self, start: Sums, columns: Any, q_tile: Any, keys: Any, values: Any, wide: Any, arrivals: Any, consumed: Any, weighed: Any
    ) -> Sums:
        """Over the tiles of its turns."""
        warpgroup, tiling = self.warpgroup, self.tiling
        tokens, turns = tiling.tokens, tiling.warpgroups

        def one(i: Array, carry: Sums) -> Sums:
            total, top, sum_ = carry
            tile = i * turns + self.turn
            stage, position = lax.rem(tile, tiling.stages), (self.part.start + tile) * tokens
            plgpu.barrier_wait(arrivals[0].at[stage])
            key_tile = self._widened(keys.at[stage], wide[0]) if wide else keys.at[stage]
            scores, factor = self._capped(warpgroup.times_transposed((q_tile, key_tile)))
            if values:
                plgpu.barrier_arrive(consumed[0].at[stage])
            scores = lax.cond(self._is_cut(position, tokens), lambda scores: self._masked(scores, position), lambda scores: scores, scores)
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sum_ = sum_ * shrink + weights.sum(axis=1)
            weights = weights.astype(q_tile.dtype)
            if weighed:
                weighed[0][stage], self._weights(keys, stage, weighed)[...] = shrink, weights
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighed[1].at[stage])
            total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
            if values:
                plgpu.barrier_wait(arrivals[1].at[stage])
            value_tile = values[0].at[stage] if values else keys.at[stage, :, columns]
            if wide:
                value_tile = self._widened(value_tile, wide[1])
            if not self.options.pool_is_finite:
                self._clear(value_tile, position)
            total = warpgroup.add_product(total, weights, value_tile)
            plgpu.barrier_arrive(consumed[-1].at[stage])
            return total, new_top, sum_

        return lax.fori_loop(0, lax.div(self.part.num_tiles + (turns - 1 - self.turn), turns), one, start)

    def _follow(self, start: Sums, columns: Any, keys: Any, arrivals: Any, consumed: Any, weighed: Any) -> Sums:
        """Over all tiles, by the weights that the first part hands over."""

        def one(i: Array, total: Array) -> Array:
            stage = lax.rem(i, self.tiling.stages)
            plgpu.barrier_wait(arrivals[0].at[stage])
            value_tile = keys.at[stage, :, columns]
            plgpu.barrier_wait(weighed[1].at[stage])  # the scores are done: their product reads these columns too
            if not self.options.pool_is_finite:
                self._clear(value_tile, (self.part.start + i) * self.tiling.tokens)
            total = total * lax.broadcast_in_dim(self.warpgroup.load(weighed[0].at[stage]), total.shape, [0])
            total = self.warpgroup.add_product(total, self._weights(keys, stage, weighed), value_tile)
            plgpu.barrier_arrive(consumed[-1].at[stage])
            return total

        total, top, sum_ = start
        return lax.fori_loop(0, self.part.num_tiles, one, total), top, sum_

    def _weights(self, keys: Any, stage: Array, weighed: Any) -> Any:
        """Where a tile's weights are handed over."""
        if len(weighed) > 2:
            return weighed[2].at[stage]
        return keys.at[stage, :, pl.ds(self.options.value_size or 0, self.tiling.tokens)]

    def _both(self, sums: Sums, others: tuple[Any, Any, Any]) -> Sums:
        """Its own and another warpgroup's, as if one had had all tiles."""
        total, top, sum_ = sums
        other_total, other_top, other_sum = (self.warpgroup.load(ref) for ref in others)
        new_top = jnp.maximum(top, other_top)
        shrink, other_shrink = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
        total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
        total += other_total * lax.broadcast_in_dim(other_shrink, total.shape, [0])
        return total, new_top, sum_ * shrink + other_sum * other_shrink

    def _capped(self, products: Array) -> tuple[Array, Array | float]:
        """Scores, and what makes them exponents of 2. A float8 pool's keys may be scaled by 0."""
        if self.options.soft_cap is None:
            return products, jnp.maximum(self.scale * LOG2_E, SMALLEST_FACTOR)
        return jnp.tanh(products * (self.scale / self.options.soft_cap)), self.options.soft_cap * LOG2_E

    def _is_cut(self, position: Array, tokens: int) -> Array:
        """Whether any query doesn't see all of a tile that begins at this position: most tiles are spared the mask."""
        context, num_tokens, span = self.part.context, self.options.num_tokens, self.options.span
        is_cut = position + tokens > jnp.maximum(context - num_tokens, 0) + 1
        if span == FULL_ATTENTION:
            return is_cut
        return is_cut | (position < (self.part.first if num_tokens == 1 else first_seen(span, context - 1)))

    def _masked(self, scores: Array, position: Array) -> Array:
        """Without those that a query doesn't see."""
        return jnp.where(self._is_seen(self.warpgroup.iota((ROWS, scores.shape[1]), 1), position), scores, NOTHING)

    # What is the same for a whole tile stands on one side, as a scalar: added to every place it takes registers, which ptxas then spills.

    def _is_seen(self, place: Array, position: Array) -> Array:
        """Which tokens of a tile that begins at this position, by their places in it, each row's query attends to."""
        if self.options.num_tokens == 1:
            return self._is_anyones(place, position)
        token = lax.div(self.warpgroup.places() + self.first_row, self.options.num_queries // self.options.num_tokens)
        own = token + (self.part.context - self.options.num_tokens)
        is_past = place <= lax.broadcast_in_dim(own - position, place.shape, [0])
        if self.options.span == FULL_ATTENTION:
            return is_past
        first = first_seen(self.options.span, own) - position
        return is_past & (place >= lax.broadcast_in_dim(first, place.shape, [0]))

    def _is_anyones(self, place: Array, position: Array) -> Array:
        """Which of them are attended to at all."""
        is_before_end = place < self.part.context - position
        return is_before_end if self.options.span == FULL_ATTENTION else (place >= self.part.first - position) & is_before_end

    def _clear(self, values: Any, position: Array) -> None:
        """Zeros for values that no weight but 0 goes to: 0 times NaN is NaN."""
        is_cut = position + values.shape[0] > self.part.context

        @pl.when(is_cut if self.options.span == FULL_ATTENTION else is_cut | (position < self.part.first))
        def _clear_values() -> None:
            is_anyones = self._is_anyones(self.warpgroup.iota(values.shape, 0), position)
            values[...] = jnp.where(is_anyones, self.warpgroup.load(values), 0)
            plgpu.commit_smem()

    def _widened(self, tile: Any, wide: Any) -> Any:
        """A tile of float8 as the products take it."""
        wide[...] = self.warpgroup.load_to_widen(tile).astype(wide.dtype)
        plgpu.commit_smem()
        return wide


def _ceil_div(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), b)
