"""paged_attention on NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU.

A thread block has one KV head of one request, and one split of its context. One producer warpgroup has the copy engine
fetch tiles of keys and values from their pages, several ahead. Consumer warpgroups process the tiles in rotation,
multiply, keep an online softmax (FlashAttention, arXiv:2205.14135), and merge their states. All query heads of the KV
head are rows of one tile, so every page is read once. `combine_splits` combines KV splits afterwards (Flash-Decoding).
For latents (MLA, arXiv:2405.04434) the values are columns of the keys' tile, and two warpgroups accumulate half of them
each. One computes the scores and their softmax. It passes the weights to the other through the columns that are keys
alone, which are no longer needed.

The same launch may write the new token's key and value. The old contents of their slot may be on their way to shared
memory while they are overwritten; nothing reads that slot. Instead the softmax of one block a KV head begins with the
new token, from registers, and tiles end before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.attention import LOG2_E, drain, wait_if
from pallas_kernels.mosaic.card import card_for, target_device
from pallas_kernels.mosaic.in_place import kernel_in_place
from pallas_kernels.mosaic.split_combine import combine_splits
from pallas_kernels.mosaic.warp_products import TILE_ROWS
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup, compiler_params, interleaved
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention.mosaic_consumer import ConsumerWarpgroup, DecodeOptions, KVSplit
from pallas_kernels.paged_attention.mosaic_new_token import NewToken, NewTokens
from pallas_kernels.paged_attention.mosaic_tiling import DecodeTiling, num_row_tiles, padded_rows, tiling_for
from pallas_kernels.paged_attention.query_rows import group_by_kv_head, num_tokens, restore_token_order
from pallas_kernels.span import FULL_ATTENTION, Span

_COLUMNS = 256  # of the result that fit in a warpgroup's registers


def write_and_attend(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    page_ids: Int[Array, " B"],
    offsets: Int[Array, " B"],
    kv_len: Int[Array, " B"],
    *,
    tiling: DecodeTiling | None = None,
    interpreted: bool = False,
    **options: Any,
) -> tuple[Float[Array, "B N H"], Float[Array, "L 2 P K G H"]]:
    """See op.py. One launch where the tiling says so, which writes nothing for a row without context. `options` are
    `paged_attention`'s."""
    tiling = tiling or _tiling(q, kv_pages, page_table, is_written=False)
    if not tiling.writes:
        kv_pages = write(kv_pages, layer, (k, v), page_ids, offsets)
        out = paged_attention(q, kv_pages, layer, page_table, kv_len, tiling=tiling, interpreted=interpreted, **options)
        return out, kv_pages
    if kv_pages.dtype.itemsize != 2:
        raise ValueError(f"paged_attention: no launch writes {kv_pages.dtype.name} pages and attends to them")
    new = NewTokens(k, v, page_ids, offsets)
    pool = jax.new_ref(kv_pages, memory_space=plgpu.GMEM)
    out = _attend(q, pool, layer, page_table, kv_len, tiling=tiling, interpreted=interpreted, new=new, **options)[0]
    return out, jax.freeze(pool)


def paged_attention(*arguments: Any, **options: Any) -> Float[Array, "B *T N V"]:
    """`paged_attention_and_lse`'s first result."""
    return paged_attention_and_lse(*arguments, **options)[0]


def paged_attention_and_lse(
    q: Float[Array, "B *T N H"],
    kv_pages: Float[Array, "L S P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
    kv_scales: Float[Array, "L S K"] | None = None,
    value_size: int | None = None,
    tiling: DecodeTiling | None = None,
    interpreted: bool = False,
) -> tuple[Float[Array, "B *T N V"], Float[Array, "B *T N"]]:
    """See op.py. `interpreted`: run by JAX's interpreter on a CPU. Raises `ValueError` for a scale or a tiling that the
    kernel can't use."""
    return _attend(
        q,
        kv_pages,
        layer,
        page_table,
        kv_len,
        scale=scale,
        pool_is_finite=pool_is_finite,
        span=span,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        value_size=value_size,
        tiling=tiling or _tiling(q, kv_pages, page_table, is_latent=value_size is not None),
        interpreted=interpreted,
    )


def _tiling(q: Array, kv_pages: Array, page_table: Array, **kind: bool) -> DecodeTiling:
    batch, num_queries, head_size = q.shape[0], num_tokens(q) * q.shape[-2], q.shape[-1]
    num_kv_heads, page_size = kv_pages.shape[3:5]
    max_context = page_table.shape[1] * page_size
    return tiling_for(batch, num_kv_heads, num_queries // num_kv_heads, head_size, page_size, max_context, kv_pages.dtype, **kind)


def _attend(
    q: Array,
    kv_pages: Any,  # an array, or a Ref of one that is written to
    layer: Array,
    page_table: Array,
    kv_len: Array,
    *,
    scale: float,
    pool_is_finite: bool,
    tiling: DecodeTiling,
    interpreted: bool,
    span: Span = FULL_ATTENTION,
    soft_cap: float | None = None,
    kv_scales: Array | None = None,
    value_size: int | None = None,
    new: NewTokens | None = None,
) -> tuple[Float[Array, "B *T N V"], Float[Array, "B *T N"]]:
    if scale <= 0:
        raise ValueError(f"paged_attention: for mosaic_gpu scale {scale} must be positive")
    num_kv_heads, page_size = kv_pages.shape[3:5]
    dtype, tokens = kv_pages.dtype, num_tokens(q)
    # type of the products: float8 can be converted to no other type
    factor = jnp.float16 if dtype.itemsize == 1 else dtype
    rows = group_by_kv_head(q.astype(factor), num_kv_heads)
    num_queries = rows.shape[2]
    if new is not None:
        rows = new.after(rows)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded_rows(rows.shape[2]) - rows.shape[2]), (0, 0)))
    scales = jnp.full(num_kv_heads, scale, jnp.float32)
    if kv_scales is not None:
        scales *= kv_scales[layer, 0]
    options = DecodeOptions(num_queries, tokens, value_size, pool_is_finite, span, soft_cap)
    body = _DecodeKernel(Warpgroup(interpreted, card_for(target_device()).has_wgmma), tiling, page_size, page_table.shape[1], options)
    out, weight = body.call(rows, kv_pages, scales, layer, page_table, kv_len, new)
    out = out[..., :num_queries, :]
    if tiling.splits > 1:
        partial_results = out.reshape(tiling.splits, -1, *out.shape[3:]), weight.reshape(tiling.splits, -1, weight.shape[-1])
        out = combine_splits(body.warpgroup, *partial_results, rows.dtype).reshape(out.shape[1:])
    else:
        out = out[0]
    weight = weight[..., :num_queries]
    # Of splits without any token the largest weight is about INITIAL_MAX, and so is their sum.
    lse = (weight.max(0) + jnp.log2(jnp.exp2(weight - weight.max(0)).sum(0))) / LOG2_E
    if kv_scales is not None:
        out = out.astype(jnp.float32) * kv_scales[layer, -1][:, None, None]
    return restore_token_order(out, q).astype(q.dtype), restore_token_order(lse, q)


@dataclass(frozen=True)
class _DecodeKernel:
    """The kernel, with everything that is known at compile time."""

    warpgroup: Warpgroup
    tiling: DecodeTiling
    page_size: int
    table_width: int
    options: DecodeOptions

    @property
    def num_rows(self) -> int:
        """Rows that are copied: the queries, and padding up to a whole tile of shared memory. Padding is never written
        and may hold anything; no row's result depends on another's."""
        return padded_rows(self.options.num_queries)

    @property
    def num_results(self) -> int:
        """Rows that are written: the queries' alone, where one block has them all."""
        return self.num_rows if num_row_tiles(self.num_rows) > 1 else self.options.num_queries

    def call(
        self, rows: Array, kv_pages: Any, scales: Array, layer: Array, page_table: Array, kv_len: Array, new: NewTokens | None
    ) -> tuple[Float[Array, "S B K R V"], Float[Array, "S B K W"]]:
        batch, num_kv_heads, _, head_size = rows.shape
        tiling, num_rows, dtype = self.tiling, self.num_rows, kv_pages.dtype
        value_size = self.options.value_size or head_size
        out_dtype = jnp.float32 if tiling.splits > 1 else rows.dtype
        tiles = plgpu.SMEM((tiling.stages, tiling.tokens, head_size), dtype, transforms=interleaved(head_size, dtype))
        num_column_parts = self._num_column_parts(value_size)
        if num_column_parts > 1 and tiling.warpgroups > 1:
            raise ValueError(
                f"paged_attention: {value_size} columns of a result leave no warpgroups to take turns, not {tiling.warpgroups}"
            )
        out_shape = (num_column_parts, ROWS, value_size // num_column_parts)
        # Rows that are no whole tiles are copied without interleaving.
        are_tiles = self.num_results % TILE_ROWS == 0
        out_tile = plgpu.SMEM(out_shape, out_dtype, transforms=interleaved(out_shape[-1], out_dtype) if are_tiles else ())
        num_consumers = tiling.warpgroups
        totals = (
            plgpu.SMEM((num_consumers - 1, ROWS, value_size), jnp.float32, transforms=interleaved(value_size, jnp.float32))
            if num_consumers > 1
            else out_tile
        )
        wide = plgpu.SMEM((num_consumers, tiling.tokens, head_size), rows.dtype, transforms=interleaved(head_size, rows.dtype))
        arrivals = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=max(tiling.tokens // self.page_size, 1))
        consumed = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=num_column_parts)
        num_sides = 1 if self.options.value_size else 2
        scratch = {
            "q_tile": plgpu.SMEM((ROWS, head_size), rows.dtype, transforms=interleaved(head_size, rows.dtype)),
            "weight_tile": plgpu.SMEM((ROWS,), jnp.float32),
            "softmaxes": plgpu.SMEM((2, num_consumers, ROWS), jnp.float32),  # maxima and sums
            # Warpgroups' totals are merged when no key is needed any more; the result is written after that.
            "keys_or_totals_or_out": self.warpgroup.union(tiles, totals, out_tile),
            "values": (tiles,) * (num_sides - 1),
            "wide": (wide,) * 2 if dtype.itemsize == 1 else (),
            "q_arrival": plgpu.Barrier(),
            "arrivals": (arrivals,) * num_sides,
            "consumed": (consumed,) * num_sides,
            "done": plgpu.Barrier(num_arrivals=num_column_parts * num_consumers),
            "handed_over": plgpu.Barrier(num_arrivals=max(num_consumers - 1, 1)),
            "weight_exchange": self._weight_exchange(head_size, value_size, rows.dtype),
        }
        kernel = (self.warpgroup.kernel if new is None else partial(kernel_in_place, self.warpgroup))(
            self._kernel,
            "paged_attention",
            out_type=[
                jax.ShapeDtypeStruct((tiling.splits, batch, num_kv_heads, self.num_results, value_size), out_dtype),
                jax.ShapeDtypeStruct((tiling.splits, batch, num_kv_heads, num_row_tiles(num_rows) * ROWS), jnp.float32),
            ],
            grid=(tiling.splits, num_kv_heads * num_row_tiles(num_rows), batch),
            grid_names=("split", "tile", "request"),
            num_threads=num_column_parts * num_consumers + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=compiler_params(approx_math=True),
        )
        return kernel(rows, kv_pages, scales, layer.reshape(1), page_table, kv_len, None if new is None else new.page_slots)

    def _kernel(
        self, q: Any, kv: Any, scales: Any, layer: Any, page_table: Any, kv_len: Any, new_at: Any, out: Any, weight: Any, **scratch: Any
    ) -> None:
        request, tile, split = (lax.axis_index(name) for name in ("request", "tile", "split"))
        head = lax.div(tile, num_row_tiles(self.num_rows))
        first_row = pl.multiple_of(lax.rem(tile, num_row_tiles(self.num_rows)) * ROWS, ROWS)
        rows, results = (pl.ds(first_row, min(number, ROWS)) for number in (self.num_rows, self.num_results))
        pool, context = kv.at[layer[0]], kv_len[request]
        kv_split = KVSplit.for_block(self.options, context, split, self.tiling, num_new=0 if new_at is None else 1)
        num_column_parts, num_consumers = self._num_column_parts(out.shape[-1]), self.tiling.warpgroups
        token = None
        if new_at is not None:
            new_rows, place = q.at[request, head, pl.ds(self.options.num_queries, 2)], (new_at[0][request], head, new_at[1][request])
            is_attended = (context > 0) & (split == 0)
            token = NewToken(new_rows, pool.at[0, *place], pool.at[1, *place], is_attended, is_attended & (first_row == 0))

        for index in range(num_column_parts * num_consumers):

            @pl.when(lax.axis_index("warpgroup") == index)
            def _multiply(index: int = index) -> None:
                goes_to = out.at[split, request, head, results], weight.at[split, request, head, pl.ds(first_row, ROWS)]
                about_call, about_block = (self.warpgroup, self.tiling, self.options), (kv_split, first_row)
                multiplier = ConsumerWarpgroup(
                    *about_call, *about_block, index // num_consumers, num_column_parts, index % num_consumers, scales[head], token
                )
                multiplier.run(q.at[request, head, rows], *goes_to, **scratch)

        @pl.when(lax.axis_index("warpgroup") == num_column_parts * num_consumers)
        def _fetch() -> None:
            self._fetch(kv_split, lambda side, page: pool.at[side, page, head], lambda place: page_table[request, place], **scratch)

    def _fetch(
        self, kv_split: KVSplit, page_at: Any, page_id: Any, keys_or_totals_or_out: Any, values: Any, arrivals: Any, consumed: Any, **_: Any
    ) -> None:
        """Fetches the tiles, as many ahead as there are stages."""
        plgpu.set_max_registers(40, action="decrease")
        stages, tiles = self.tiling.stages, (keys_or_totals_or_out[0], *values)
        num_pages, of_page = max(self.tiling.tokens // self.page_size, 1), min(self.tiling.tokens, self.page_size)

        def fetch(i: Array, _: None) -> None:
            stage = lax.rem(i, stages)
            first = lax.div((kv_split.start + i) * self.tiling.tokens, self.page_size)
            pages = [page_id(jnp.minimum(first + j, self.table_width - 1)) for j in range(num_pages)]
            # One tile of a page that has several.
            rows = pl.ds(pl.multiple_of(lax.rem((kv_split.start + i) * self.tiling.tokens, self.page_size), of_page), of_page)
            for side, (tile, arrival) in enumerate(zip(tiles, arrivals, strict=True)):
                wait_if(i >= stages, consumed[side].at[stage])
                for j, page in enumerate(pages):
                    page_tile = page_at(side, page) if of_page == self.page_size else page_at(side, page).at[rows]
                    plgpu.copy_gmem_to_smem(page_tile, tile.at[stage, pl.ds(j * of_page, of_page)], arrival.at[stage])

        lax.fori_loop(0, kv_split.num_tiles, fetch, None)
        drain(consumed, kv_split.num_tiles, stages)

    def _weight_exchange(self, head_size: int, value_size: int, dtype: jnp.dtype) -> tuple[Any, ...]:
        """What one column part passes to another for each tile: the factor that rescales its sums, and a barrier for
        the weights; and room for the weights, where the keys' tile has none."""
        if self._num_column_parts(value_size) == 1:
            return ()
        stages, tokens = self.tiling.stages, self.tiling.tokens
        rescales, arrivals = plgpu.SMEM((stages, ROWS), jnp.float32), plgpu.Barrier(num_barriers=stages)
        room = plgpu.SMEM((stages, ROWS, tokens), dtype, transforms=interleaved(tokens, dtype))
        return (rescales, arrivals) if head_size - value_size >= tokens else (rescales, arrivals, room)

    def _num_column_parts(self, value_size: int) -> int:
        """Warpgroups that share the columns of a result."""
        return -(-value_size // _COLUMNS)
