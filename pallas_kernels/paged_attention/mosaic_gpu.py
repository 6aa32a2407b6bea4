"""paged_attention on Hopper GPUs, in Pallas for Mosaic GPU.

A block of threads has one KV head of one request, and a share of its context: one warpgroup has the copy engine bring tiles of keys and
values from their pages, several ahead; others take them by turns, multiply and keep an online softmax (FlashAttention, arXiv:2205.14135), and
put together what they have. All query heads of the KV head are rows of one tile, so every page is read once. Shares of a context are put
together afterwards (Flash-Decoding). Of latents (MLA, arXiv:2405.04434) the values are columns of the keys' tile, and two
warpgroups sum up half of them each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.attention import LOG2_E, NOTHING, drain, wait_if
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup, interleaved
from pallas_kernels.paged_attention.mosaic_tiling import ROW_TILE, Tiling, num_row_tiles, tiling_for
from pallas_kernels.seen import first_seen
from pallas_kernels.span import EVERYTHING, Span

_Sums = tuple[Array, Array, Array]  # of values, [ROWS, columns], and of the softmax its maximum and sum, [ROWS]
_COLUMNS = 256  # of the result that a warpgroup has registers to sum up


def paged_attention(*arguments: Any, **options: Any) -> Float[Array, "B N V"]:
    """`paged_attention_and_lse`'s first result."""
    return paged_attention_and_lse(*arguments, **options)[0]


def paged_attention_and_lse(
    q: Float[Array, "B N H"],
    kv_pages: Float[Array, "L S P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool,
    span: Span = EVERYTHING,
    soft_cap: float | None = None,
    kv_scales: Float[Array, "L S K"] | None = None,
    value_size: int | None = None,
    tiling: Tiling | None = None,
    interpreted: bool = False,
) -> tuple[Float[Array, "B N V"], Float[Array, "B N"]]:
    """See op.py. `interpreted`: by JAX's interpreter on a CPU."""
    batch, num_heads, head_size = q.shape
    num_kv_heads, page_size = kv_pages.shape[3:5]
    group, dtype = num_heads // num_kv_heads, kv_pages.dtype
    is_latent = value_size is not None
    tiling = tiling or tiling_for(
        batch, num_kv_heads, group, head_size, page_size, page_table.shape[1] * page_size, dtype, is_latent=is_latent
    )
    # Rows of the last tile past these are never written, so they hold anything; no row's result depends on another's.
    num_rows = -(-group // ROW_TILE) * ROW_TILE
    factor = jnp.float16 if dtype.itemsize == 1 else dtype  # what is multiplied: Hopper converts float8 to no other type
    grouped = q.astype(factor).reshape(batch, num_kv_heads, group, head_size)
    rows = jnp.pad(grouped, ((0, 0), (0, 0), (0, num_rows - group), (0, 0)))
    scales = jnp.full(num_kv_heads, scale, jnp.float32)
    if kv_scales is not None:
        scales *= kv_scales[layer, 0]
    body = _Body(Warpgroup(interpreted), tiling, page_size, page_table.shape[1], num_rows, value_size, pool_is_finite, span, soft_cap)
    out, weight = body.call(rows, kv_pages, scales, layer, page_table, kv_len)
    weight = weight[..., :group]
    out = _together(out[:, :, :, :group], weight) if tiling.splits > 1 else out[:, :, 0, :group]
    # Of shares: where none has a token the largest is about NOTHING, and so is what they come to.
    lse = (weight.max(2) + jnp.log2(jnp.exp2(weight - weight.max(2, keepdims=True)).sum(2))) / LOG2_E
    if kv_scales is not None:
        out = out.astype(jnp.float32) * kv_scales[layer, -1][:, None, None]
    return out.reshape(batch, num_heads, -1).astype(q.dtype), lse.reshape(batch, num_heads)


def _together(out: Float[Array, "B K S R V"], weight: Float[Array, "B K S R"]) -> Float[Array, "B K R V"]:
    """Results of shares of a context, each with the log2 of its softmax's denominator."""
    shares = jnp.exp2(weight - weight.max(2, keepdims=True))
    return (out * (shares / shares.sum(2, keepdims=True))[..., None]).sum(2)


@dataclass(frozen=True)
class _Body:
    """The kernel, of everything that is known when it is compiled."""

    warpgroup: Warpgroup
    tiling: Tiling
    page_size: int
    table_width: int
    num_rows: int  # of a KV head's queries
    value_size: int | None  # columns of latents that are values
    pool_is_finite: bool
    span: Span
    soft_cap: float | None

    def call(
        self, rows: Array, kv_pages: Array, scales: Array, layer: Array, page_table: Array, kv_len: Array
    ) -> tuple[Float[Array, "B K S R V"], Float[Array, "B K S R"]]:
        batch, num_kv_heads, num_rows, head_size = rows.shape
        tiling, dtype = self.tiling, kv_pages.dtype
        value_size = self.value_size or head_size
        out_dtype = jnp.float32 if tiling.splits > 1 else rows.dtype
        tiles = plgpu.SMEM((tiling.stages, tiling.tokens, head_size), dtype, transforms=interleaved(head_size, dtype))
        num_parts = self._num_parts(value_size)
        out_shape = (num_parts, ROWS, value_size // num_parts)
        out_tile = plgpu.SMEM(out_shape, out_dtype, transforms=interleaved(out_shape[-1], out_dtype))
        turns = tiling.warpgroups
        totals = plgpu.SMEM((max(turns - 1, 1), ROWS, value_size), jnp.float32, transforms=interleaved(value_size, jnp.float32))
        wide = plgpu.SMEM((turns, tiling.tokens, head_size), rows.dtype, transforms=interleaved(head_size, rows.dtype))
        arrivals = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=max(tiling.tokens // self.page_size, 1))
        consumed = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=num_parts)
        num_sides = 1 if self.value_size else 2
        scratch = {
            "q_tile": plgpu.SMEM((ROWS, head_size), rows.dtype, transforms=interleaved(head_size, rows.dtype)),
            "weight_tile": plgpu.SMEM((ROWS,), jnp.float32),
            "softmaxes": plgpu.SMEM((2, turns, ROWS), jnp.float32),  # maxima and sums
            # What warpgroups have summed up is put together when no key is needed any more, and the result is written after that.
            "keys_or_totals_or_out": self.warpgroup.union(tiles, totals, out_tile),
            "values": (tiles,) * (num_sides - 1),
            "wide": (wide,) * 2 if dtype.itemsize == 1 else (),
            "q_arrival": plgpu.Barrier(),
            "arrivals": (arrivals,) * num_sides,
            "consumed": (consumed,) * num_sides,
            "done": plgpu.Barrier(num_arrivals=num_parts * turns),
            "handed_over": plgpu.Barrier(num_arrivals=max(turns - 1, 1)),
        }
        kernel = self.warpgroup.kernel(
            self._kernel,
            out_type=[
                jax.ShapeDtypeStruct((batch, num_kv_heads, tiling.splits, num_rows, value_size), out_dtype),
                jax.ShapeDtypeStruct((batch, num_kv_heads, tiling.splits, num_row_tiles(num_rows) * ROWS), jnp.float32),
            ],
            grid=(tiling.splits, num_kv_heads * num_row_tiles(num_rows), batch),
            grid_names=("share", "tile", "request"),
            num_threads=num_parts * turns + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        return kernel(rows, kv_pages, scales, layer.reshape(1), page_table, kv_len)

    def _kernel(
        self, q: Any, kv: Any, scales: Any, layer: Any, page_table: Any, kv_len: Any, out: Any, weight: Any, **scratch: Any
    ) -> None:
        request, tile, share = (lax.axis_index(name) for name in ("request", "tile", "share"))
        head = lax.div(tile, num_row_tiles(self.num_rows))
        first_row = pl.multiple_of(lax.rem(tile, num_row_tiles(self.num_rows)) * ROWS, ROWS)
        rows = pl.ds(first_row, min(self.num_rows, ROWS))
        part = _Part.of_share(self.span, kv_len[request], share, self.tiling)
        num_parts, turns = self._num_parts(out.shape[-1]), self.tiling.warpgroups

        for index in range(num_parts * turns):

            @pl.when(lax.axis_index("warpgroup") == index)
            def _multiply(index: int = index) -> None:
                goes_to = out.at[request, head, share, rows], weight.at[request, head, share, pl.ds(first_row, ROWS)]
                multiplier = _Multiplier(self, part, index // turns, num_parts, index % turns, scales[head])
                multiplier.run(q.at[request, head, rows], *goes_to, **scratch)

        @pl.when(lax.axis_index("warpgroup") == num_parts * turns)
        def _fetch() -> None:
            pool = kv.at[layer[0]]
            self._fetch(part, lambda side, page: pool.at[side, page, head], lambda place: page_table[request, place], **scratch)

    def _fetch(
        self, part: _Part, page_at: Any, page_id: Any, keys_or_totals_or_out: Any, values: Any, arrivals: Any, consumed: Any, **_: Any
    ) -> None:
        """Bring the tiles, as many ahead as there are stages."""
        plgpu.set_max_registers(40, action="decrease")
        stages, tiles = self.tiling.stages, (keys_or_totals_or_out[0], *values)
        num_pages, of_page = max(self.tiling.tokens // self.page_size, 1), min(self.tiling.tokens, self.page_size)

        def fetch(i: Array, _: None) -> None:
            stage = lax.rem(i, stages)
            first = lax.div((part.start + i) * self.tiling.tokens, self.page_size)
            pages = [page_id(jnp.minimum(first + j, self.table_width - 1)) for j in range(num_pages)]
            # Of a page that is several tiles, one.
            rows = pl.ds(pl.multiple_of(lax.rem((part.start + i) * self.tiling.tokens, self.page_size), of_page), of_page)
            for side, (tile, arrival) in enumerate(zip(tiles, arrivals, strict=True)):
                wait_if(i >= stages, consumed[side].at[stage])
                for j, page in enumerate(pages):
                    page_tile = page_at(side, page) if of_page == self.page_size else page_at(side, page).at[rows]
                    plgpu.copy_gmem_to_smem(page_tile, tile.at[stage, pl.ds(j * of_page, of_page)], arrival.at[stage])

        lax.fori_loop(0, part.num_tiles, fetch, None)
        drain(consumed, part.num_tiles, stages)

    def _num_parts(self, value_size: int) -> int:
        """Warpgroups that share the columns of a result."""
        return -(-value_size // _COLUMNS)


@dataclass(frozen=True)
class _Part:
    """A block's share of a context."""

    first: Array | int  # position that the query attends to
    context: Array  # positions before which it does
    start: Array  # tile
    num_tiles: Array

    @classmethod
    def of_share(cls, span: Span, context: Array, share: Array, tiling: Tiling) -> _Part:
        first = first_seen(span, jnp.maximum(context - 1, 0))
        first_tile = 0 if span == EVERYTHING else lax.div(first, tiling.tokens)
        num_tiles = _ceil_div(context, tiling.tokens) - first_tile
        of_share = _ceil_div(num_tiles, tiling.splits)
        start = share * of_share
        return cls(first, context, start + first_tile, jnp.maximum(jnp.minimum(start + of_share, num_tiles) - start, 0))


@dataclass(frozen=True)
class _Multiplier:
    """A warpgroup that attends over tiles as they come: over those of its turns, for its part of the result's columns."""

    body: _Body
    part: _Part
    index: int
    num_parts: int
    turn: int
    scale: Array

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
    ) -> None:
        plgpu.set_max_registers(232, action="increase")
        keys, totals, out_tile = keys_or_totals_or_out
        size, turns = out.shape[-1] // self.num_parts, self.body.tiling.warpgroups
        columns, rows = pl.ds(self.index * size, size), pl.ds(0, q.shape[0])
        if self.index == self.turn == 0:
            plgpu.copy_gmem_to_smem(q, q_tile.at[rows], q_arrival)
        plgpu.barrier_wait(q_arrival)
        sums = self._attend(columns, size, q_tile, keys, values, [w.at[self.turn] for w in wide], arrivals, consumed)
        if self.num_parts * turns > 1:  # the others may still read the keys that totals are written over
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
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
        plgpu.copy_smem_to_gmem(out_tile.at[self.index, rows], out.at[:, columns])
        if self.index == 0:
            plgpu.copy_smem_to_gmem(weight_tile, weight)
        plgpu.wait_smem_to_gmem(0)

    def _attend(self, columns: Any, size: int, q_tile: Any, keys: Any, values: Any, wide: Any, arrivals: Any, consumed: Any) -> _Sums:
        """Over the tiles of its turns."""
        warpgroup, tiling = self.body.warpgroup, self.body.tiling
        tokens, turns = tiling.tokens, tiling.warpgroups

        def one(i: Array, carry: _Sums) -> _Sums:
            total, top, sum_ = carry
            tile = i * turns + self.turn
            stage, position = lax.rem(tile, tiling.stages), (self.part.start + tile) * tokens
            plgpu.barrier_wait(arrivals[0].at[stage])
            key_tile = self._widened(keys.at[stage], wide[0]) if wide else keys.at[stage]
            scores = self._capped(warpgroup.times_transposed(q_tile, key_tile))
            if values:
                plgpu.barrier_arrive(consumed[0].at[stage])
            scores = jnp.where(self._is_seen(warpgroup.iota((ROWS, tokens), 1) + position), scores, NOTHING)
            new_top = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sum_ = sum_ * shrink + weights.sum(axis=1)
            total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
            if values:
                plgpu.barrier_wait(arrivals[1].at[stage])
            value_tile = values[0].at[stage] if values else keys.at[stage, :, columns]
            if wide:
                value_tile = self._widened(value_tile, wide[1])
            if not self.body.pool_is_finite:
                self._clear(value_tile, position)
            total = warpgroup.add_product(total, weights.astype(q_tile.dtype), value_tile)
            plgpu.barrier_arrive(consumed[-1].at[stage])
            return total, new_top, sum_

        nothing = warpgroup.full((ROWS, size), 0.0), warpgroup.full((ROWS,), NOTHING), warpgroup.full((ROWS,), 0.0)
        return lax.fori_loop(0, lax.div(self.part.num_tiles + (turns - 1 - self.turn), turns), one, nothing)

    def _both(self, sums: _Sums, others: tuple[Any, Any, Any]) -> _Sums:
        """Its own and another warpgroup's, as if one had had all tiles."""
        total, top, sum_ = sums
        other_total, other_top, other_sum = (self.body.warpgroup.load(ref) for ref in others)
        new_top = jnp.maximum(top, other_top)
        shrink, other_shrink = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
        total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
        total += other_total * lax.broadcast_in_dim(other_shrink, total.shape, [0])
        return total, new_top, sum_ * shrink + other_sum * other_shrink

    def _capped(self, scores: Array) -> Array:
        """Products as exponents of 2."""
        if self.body.soft_cap is None:
            return scores * (self.scale * LOG2_E)
        return jnp.tanh(scores * (self.scale / self.body.soft_cap)) * (self.body.soft_cap * LOG2_E)

    def _is_seen(self, position: Array) -> Array:
        """Where the query attends to."""
        is_before_end = position < self.part.context
        return is_before_end if self.body.span == EVERYTHING else (position >= self.part.first) & is_before_end

    def _clear(self, values: Any, position: Array) -> None:
        """Zeros for values that no weight but 0 goes to: 0 times NaN is NaN."""
        is_cut = position + values.shape[0] > self.part.context

        @pl.when(is_cut if self.body.span == EVERYTHING else is_cut | (position < self.part.first))
        def _clear_values() -> None:
            place = self.body.warpgroup.iota(values.shape, 0) + position
            values[...] = jnp.where(self._is_seen(place), self.body.warpgroup.load(values), 0)
            plgpu.commit_smem()

    def _widened(self, tile: Any, wide: Any) -> Any:
        """A tile of float8 as the products take it."""
        wide[...] = self.body.warpgroup.load(tile).astype(wide.dtype)
        plgpu.commit_smem()
        return wide


def _ceil_div(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), b)
