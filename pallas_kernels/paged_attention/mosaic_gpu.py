"""paged_attention on Hopper GPUs, in Pallas for Mosaic GPU.

A block of threads has one KV head of one request, and a share of its context: one warpgroup has the copy engine bring tiles of keys and
values from their pages, several ahead, the other multiplies and keeps an online softmax (FlashAttention, arXiv:2205.14135). All query heads of
the KV head are rows of one tile, so every page is read once. Shares of a context are put together afterwards (Flash-Decoding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.warpgroup import ROWS, SHARED_MEMORY, Warpgroup, interleaved
from pallas_kernels.span import EVERYTHING, Span

_LOG2_E = math.log2(math.e)
_NOTHING = -1e30  # a score that counts for nothing; -inf less itself would be NaN
_BLOCKS = 2 * 132  # that an H100 or H200 runs at a time, two a multiprocessor
_SHORTEST_SHARE = 256  # tokens that are worth a block
_LARGEST_HEAD = 256
_ROW_TILE = 8  # rows of shared memory are copied by eights


@dataclass(frozen=True)
class Tiling:
    """How a call is cut up."""

    tokens: int  # of a tile: a multiple of the page size and of 64
    stages: int  # tiles of keys, and of values, on their way or in use
    splits: int  # shares of each context


def tiling_for(batch: int, num_kv_heads: int, head_size: int, page_size: int, max_context: int) -> Tiling:
    """A tiling that fills the GPU and leaves two blocks a multiprocessor room. It is derived, not yet tuned on a GPU."""
    splits = max(1, min(_BLOCKS // (batch * num_kv_heads), -(-max_context // _SHORTEST_SHARE)))
    tokens = max(ROWS, page_size)
    fixed, stage = ROWS * head_size * 2 + 4096, 2 * tokens * head_size * 2
    room = SHARED_MEMORY // 2 if fixed + 2 * stage <= SHARED_MEMORY // 2 else SHARED_MEMORY
    return Tiling(tokens, max(2, min(4, (room - fixed) // stage)), splits)


def why_not(dtype: jnp.dtype, group: int, head_size: int, page_size: int) -> str | None:
    """Why this kernel can't attend over such pages, a KV head for `group` query heads; None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it has no kernel for {dtype.name} pages"
    if head_size % 16 or head_size > _LARGEST_HEAD:
        return f"it has no kernel for heads of {head_size}: they must be a multiple of 16, at most {_LARGEST_HEAD}"
    if page_size % _ROW_TILE or (ROWS % page_size and page_size % ROWS) or page_size > 2 * ROWS:
        return f"it has no kernel for pages of {page_size} tokens: they must be of 8, 16, 32, 64 or 128"
    if group > ROWS:
        return f"it has no kernel for {group} query heads a KV head: at most {ROWS}"
    return None


def paged_attention(
    q: Float[Array, "B N H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool,
    span: Span = EVERYTHING,
    soft_cap: float | None = None,
    tiling: Tiling | None = None,
    interpreted: bool = False,
) -> Float[Array, "B N H"]:
    """See op.py. `interpreted`: by JAX's interpreter on a CPU."""
    batch, num_heads, head_size = q.shape
    num_kv_heads, page_size = kv_pages.shape[3:5]
    group = num_heads // num_kv_heads
    tiling = tiling or tiling_for(batch, num_kv_heads, head_size, page_size, page_table.shape[1] * page_size)
    # Rows of the tile past these are never written, so they hold anything; no row's result depends on another's.
    num_rows = -(-group // _ROW_TILE) * _ROW_TILE
    grouped = q.astype(kv_pages.dtype).reshape(batch, num_kv_heads, group, head_size)
    rows = jnp.pad(grouped, ((0, 0), (0, 0), (0, num_rows - group), (0, 0)))
    body = _Body(Warpgroup(interpreted), tiling, page_size, page_table.shape[1], num_rows, scale, pool_is_finite, span, soft_cap)
    out, weight = body.call(rows, kv_pages, layer, page_table, kv_len)
    out = _together(out[:, :, :, :group], weight[..., :group]) if tiling.splits > 1 else out[:, :, 0, :group]
    return out.reshape(q.shape).astype(q.dtype)


def _together(out: Float[Array, "B K S R H"], weight: Float[Array, "B K S R"]) -> Float[Array, "B K R H"]:
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
    num_rows: int
    scale: float
    pool_is_finite: bool
    span: Span
    soft_cap: float | None

    def call(self, rows: Array, kv_pages: Array, layer: Array, page_table: Array, kv_len: Array) -> tuple[Array, Array]:
        batch, num_kv_heads, num_rows, head_size = rows.shape
        tiling, dtype = self.tiling, kv_pages.dtype
        out_dtype = jnp.float32 if tiling.splits > 1 else dtype
        laid = interleaved(head_size, dtype)
        tiles = plgpu.SMEM((tiling.stages, tiling.tokens, head_size), dtype, transforms=laid)
        out_tile = plgpu.SMEM((ROWS, head_size), out_dtype, transforms=interleaved(head_size, out_dtype))
        arrivals = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=tiling.tokens // self.page_size)
        consumed = plgpu.Barrier(num_barriers=tiling.stages)
        scratch = {
            "q_tile": plgpu.SMEM((ROWS, head_size), dtype, transforms=laid),
            "weight_tile": plgpu.SMEM((ROWS,), jnp.float32),
            "keys_or_out": self.warpgroup.union(tiles, out_tile),  # the result is written when no key is needed any more
            "values": tiles,
            "q_arrival": plgpu.Barrier(),
            "arrivals": (arrivals, arrivals),
            "consumed": (consumed, consumed),
        }
        shapes = [
            jax.ShapeDtypeStruct((batch, num_kv_heads, tiling.splits, num_rows, head_size), out_dtype),
            jax.ShapeDtypeStruct((batch, num_kv_heads, tiling.splits, ROWS), jnp.float32),
        ]
        kernel = self.warpgroup.kernel(
            self._kernel,
            out_type=shapes,
            grid=(tiling.splits, num_kv_heads, batch),
            grid_names=("share", "head", "row"),
            num_threads=2,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return kernel(rows, kv_pages, layer.reshape(1), page_table, kv_len)

    def _kernel(self, q: Any, kv: Any, layer: Any, page_table: Any, kv_len: Any, out: Any, weight: Any, **scratch: Any) -> None:
        row, head, share = (lax.axis_index(name) for name in ("row", "head", "share"))
        context = kv_len[row]
        first = self.span.first(jnp.maximum(context - 1, 0))
        first_tile = 0 if self.span == EVERYTHING else lax.div(first, self.tiling.tokens)
        num_tiles = _ceil_div(context, self.tiling.tokens) - first_tile
        of_share = _ceil_div(num_tiles, self.tiling.splits)
        start = share * of_share
        num_tiles = jnp.maximum(jnp.minimum(start + of_share, num_tiles) - start, 0)
        start += first_tile

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _attend() -> None:
            self._attend(
                q.at[row, head], out.at[row, head, share], weight.at[row, head, share], first, context, start, num_tiles, **scratch
            )

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _fetch() -> None:
            pool = kv.at[layer[0]]
            self._fetch(lambda side, page: pool.at[side, page, head], lambda place: page_table[row, place], start, num_tiles, **scratch)

    def _fetch(
        self,
        page_at: Any,
        page_id: Any,
        start: Array,
        num_tiles: Array,
        *,
        keys_or_out: Any,
        values: Any,
        arrivals: Any,
        consumed: Any,
        **_: Any,
    ) -> None:
        """Bring the tiles, as many ahead as there are stages."""
        plgpu.set_max_registers(40, action="decrease")
        num_pages, stages, tiles = self.tiling.tokens // self.page_size, self.tiling.stages, (keys_or_out[0], values)

        def fetch(i: Array, _: None) -> None:
            stage = lax.rem(i, stages)
            first = (start + i) * num_pages
            pages = [page_id(jnp.minimum(first + j, self.table_width - 1)) for j in range(num_pages)]
            for side in range(2):
                _wait_if(i >= stages, consumed[side].at[stage])
                for j, page in enumerate(pages):
                    place = tiles[side].at[stage, pl.ds(j * self.page_size, self.page_size)]
                    plgpu.copy_gmem_to_smem(page_at(side, page), place, arrivals[side].at[stage])

        lax.fori_loop(0, num_tiles, fetch, None)

        @pl.loop(jnp.maximum(num_tiles - stages, 0), num_tiles)  # no barrier may be left in the middle of a phase
        def _drain(i: Array) -> None:
            for side in range(2):
                plgpu.barrier_wait(consumed[side].at[lax.rem(i, stages)])

    def _attend(
        self,
        q: Any,
        out: Any,
        weight: Any,
        first: Array | int,
        context: Array,
        start: Array,
        num_tiles: Array,
        *,
        q_tile: Any,
        weight_tile: Any,
        keys_or_out: Any,
        values: Any,
        q_arrival: Any,
        arrivals: Any,
        consumed: Any,
    ) -> None:
        """Attend over the tiles as they come."""
        plgpu.set_max_registers(208, action="increase")
        warpgroup, tokens, (keys, out_tile) = self.warpgroup, self.tiling.tokens, keys_or_out
        rows = pl.ds(0, self.num_rows)
        plgpu.copy_gmem_to_smem(q, q_tile.at[rows], q_arrival)
        plgpu.barrier_wait(q_arrival)

        def one(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, top, sum_ = carry
            stage = lax.rem(i, self.tiling.stages)
            plgpu.barrier_wait(arrivals[0].at[stage])
            scores = self._capped(warpgroup.times_transposed(q_tile, keys.at[stage]))
            plgpu.barrier_arrive(consumed[0].at[stage])
            position = warpgroup.iota((ROWS, tokens), 1) + (start + i) * tokens
            scores = jnp.where(self._is_seen(position, first, context), scores, _NOTHING)
            new_top = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sum_ = sum_ * shrink + weights.sum(axis=1)
            total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
            plgpu.barrier_wait(arrivals[1].at[stage])
            if not self.pool_is_finite:
                self._clear(values.at[stage], first, context, (start + i) * tokens)
            total = warpgroup.add_product(total, weights.astype(q_tile.dtype), values.at[stage])
            plgpu.barrier_arrive(consumed[1].at[stage])
            return total, new_top, sum_

        head_size = q_tile.shape[1]
        nothing = warpgroup.full((ROWS, head_size), 0.0), warpgroup.full((ROWS,), _NOTHING), warpgroup.full((ROWS,), 0.0)
        total, top, sum_ = lax.fori_loop(0, num_tiles, one, nothing)
        sum_ = jnp.maximum(sum_, 1e-30)
        total /= lax.broadcast_in_dim(sum_, total.shape, [0])
        out_tile[...] = total.astype(out_tile.dtype)
        weight_tile[...] = top + jnp.log2(sum_)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[rows], out)
        plgpu.copy_smem_to_gmem(weight_tile, weight)
        plgpu.wait_smem_to_gmem(0)

    def _capped(self, scores: Array) -> Array:
        """Scores as exponents of 2."""
        if self.soft_cap is None:
            return scores * (self.scale * _LOG2_E)
        return jnp.tanh(scores * (self.scale / self.soft_cap)) * (self.soft_cap * _LOG2_E)

    def _is_seen(self, position: Array, first: Array | int, context: Array) -> Array:
        """Where the query attends to."""
        return position < context if self.span == EVERYTHING else (position >= first) & (position < context)

    def _clear(self, values: Any, first: Array | int, context: Array, position: Array) -> None:
        """Zeros for values that no weight but 0 goes to: 0 times NaN is NaN."""
        is_cut = position + self.tiling.tokens > context

        @pl.when(is_cut if self.span == EVERYTHING else is_cut | (position < first))
        def _clear_values() -> None:
            place = self.warpgroup.iota(values.shape, 0) + position
            values[...] = jnp.where(self._is_seen(place, first, context), self.warpgroup.load(values), 0)
            plgpu.commit_smem()


def _wait_if(condition: Array, barrier: Any) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def _ceil_div(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), b)
