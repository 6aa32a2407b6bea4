"""paged_attention on NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU.

A block of threads has one KV head of one request, and a share of its context: one warpgroup has the copy engine bring tiles of keys and
values from their pages, several ahead; others take them by turns, multiply and keep an online softmax (FlashAttention, arXiv:2205.14135), and
put together what they have. All query heads of the KV head are rows of one tile, so every page is read once. Shares of a context are put
together afterwards (Flash-Decoding). Of latents (MLA, arXiv:2405.04434) the values are columns of the keys' tile, and two
warpgroups sum up half of them each: one has the scores and their softmax, and hands the weights to the other through the columns that are keys alone,
which nobody needs any more.

The new token's key and value may be written by the same launch. Their place's old contents are then on their way to shared memory, or not, while
they are written over; no one looks at that place. The softmax of one block a KV head begins with the new token instead, from registers, and
tiles count up to it.
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
from pallas_kernels.mosaic.card import card_of, compiled_for
from pallas_kernels.mosaic.in_place import kernel_in_place
from pallas_kernels.mosaic.shares import together
from pallas_kernels.mosaic.warp_products import TILE_ROWS
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup, compiler_params, interleaved
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention.mosaic_multiplier import Multiplier, Options, Part
from pallas_kernels.paged_attention.mosaic_new_token import NewToken, NewTokens
from pallas_kernels.paged_attention.mosaic_tiling import Tiling, num_row_tiles, padded, tiling_for
from pallas_kernels.paged_attention.tokens import by_kv_head, by_token, num_tokens
from pallas_kernels.span import FULL_ATTENTION, Span

_COLUMNS = 256  # of the result that a warpgroup has registers to sum up


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
    tiling: Tiling | None = None,
    interpreted: bool = False,
    **options: Any,
) -> tuple[Float[Array, "B N H"], Float[Array, "L 2 P K G H"]]:
    """See op.py. One launch where the tiling says so, by which a row without context writes nothing; `options` are `paged_attention`'s."""
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
    tiling: Tiling | None = None,
    interpreted: bool = False,
) -> tuple[Float[Array, "B *T N V"], Float[Array, "B *T N"]]:
    """See op.py. `interpreted`: by JAX's interpreter on a CPU. Raises `ValueError` for a scale or a tiling that the kernel can't have."""
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


def _tiling(q: Array, kv_pages: Array, page_table: Array, **kind: bool) -> Tiling:
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
    tiling: Tiling,
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
    factor = jnp.float16 if dtype.itemsize == 1 else dtype  # what is multiplied: float8 is converted to no other type
    rows = by_kv_head(q.astype(factor), num_kv_heads)
    num_queries = rows.shape[2]
    if new is not None:
        rows = new.after(rows)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded(rows.shape[2]) - rows.shape[2]), (0, 0)))
    scales = jnp.full(num_kv_heads, scale, jnp.float32)
    if kv_scales is not None:
        scales *= kv_scales[layer, 0]
    options = Options(num_queries, tokens, value_size, pool_is_finite, span, soft_cap)
    body = _Body(Warpgroup(interpreted, card_of(compiled_for()).has_wgmma), tiling, page_size, page_table.shape[1], options)
    out, weight = body.call(rows, kv_pages, scales, layer, page_table, kv_len, new)
    out = out[..., :num_queries, :]
    if tiling.splits > 1:
        shares = out.reshape(tiling.splits, -1, *out.shape[3:]), weight.reshape(tiling.splits, -1, weight.shape[-1])
        out = together(body.warpgroup, *shares, rows.dtype).reshape(out.shape[1:])
    else:
        out = out[0]
    weight = weight[..., :num_queries]
    # Of shares: where none has a token the largest is about LOWEST, and so is what they come to.
    lse = (weight.max(0) + jnp.log2(jnp.exp2(weight - weight.max(0)).sum(0))) / LOG2_E
    if kv_scales is not None:
        out = out.astype(jnp.float32) * kv_scales[layer, -1][:, None, None]
    return by_token(out, q).astype(q.dtype), by_token(lse, q)


@dataclass(frozen=True)
class _Body:
    """The kernel, of everything that is known when it is compiled."""

    warpgroup: Warpgroup
    tiling: Tiling
    page_size: int
    table_width: int
    options: Options

    @property
    def num_rows(self) -> int:
        """Rows that are copied: the queries, and what follows them up to a whole tile of shared memory. Those past them are never written, so they
        hold anything; no row's result depends on another's."""
        return padded(self.options.num_queries)

    @property
    def num_results(self) -> int:
        """Rows of them that are written: the queries' alone, where one block has them all."""
        return self.num_rows if num_row_tiles(self.num_rows) > 1 else self.options.num_queries

    def call(
        self, rows: Array, kv_pages: Any, scales: Array, layer: Array, page_table: Array, kv_len: Array, new: NewTokens | None
    ) -> tuple[Float[Array, "S B K R V"], Float[Array, "S B K W"]]:
        batch, num_kv_heads, _, head_size = rows.shape
        tiling, num_rows, dtype = self.tiling, self.num_rows, kv_pages.dtype
        value_size = self.options.value_size or head_size
        out_dtype = jnp.float32 if tiling.splits > 1 else rows.dtype
        tiles = plgpu.SMEM((tiling.stages, tiling.tokens, head_size), dtype, transforms=interleaved(head_size, dtype))
        num_parts = self._num_parts(value_size)
        if num_parts > 1 and tiling.warpgroups > 1:
            raise ValueError(
                f"paged_attention: {value_size} columns of a result leave no warpgroups to take turns, not {tiling.warpgroups}"
            )
        out_shape = (num_parts, ROWS, value_size // num_parts)
        # Rows that are no whole tiles are copied from where they lie one after the other.
        are_tiles = self.num_results % TILE_ROWS == 0
        out_tile = plgpu.SMEM(out_shape, out_dtype, transforms=interleaved(out_shape[-1], out_dtype) if are_tiles else ())
        turns = tiling.warpgroups
        totals = (
            plgpu.SMEM((turns - 1, ROWS, value_size), jnp.float32, transforms=interleaved(value_size, jnp.float32))
            if turns > 1
            else out_tile
        )
        wide = plgpu.SMEM((turns, tiling.tokens, head_size), rows.dtype, transforms=interleaved(head_size, rows.dtype))
        arrivals = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=max(tiling.tokens // self.page_size, 1))
        consumed = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=num_parts)
        num_sides = 1 if self.options.value_size else 2
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
            "weighed": self._weighed(head_size, value_size, rows.dtype),
        }
        kernel = (self.warpgroup.kernel if new is None else partial(kernel_in_place, self.warpgroup))(
            self._kernel,
            "paged_attention",
            out_type=[
                jax.ShapeDtypeStruct((tiling.splits, batch, num_kv_heads, self.num_results, value_size), out_dtype),
                jax.ShapeDtypeStruct((tiling.splits, batch, num_kv_heads, num_row_tiles(num_rows) * ROWS), jnp.float32),
            ],
            grid=(tiling.splits, num_kv_heads * num_row_tiles(num_rows), batch),
            grid_names=("share", "tile", "request"),
            num_threads=num_parts * turns + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=compiler_params(approx_math=True),
        )
        return kernel(rows, kv_pages, scales, layer.reshape(1), page_table, kv_len, None if new is None else new.places)

    def _kernel(
        self, q: Any, kv: Any, scales: Any, layer: Any, page_table: Any, kv_len: Any, new_at: Any, out: Any, weight: Any, **scratch: Any
    ) -> None:
        request, tile, share = (lax.axis_index(name) for name in ("request", "tile", "share"))
        head = lax.div(tile, num_row_tiles(self.num_rows))
        first_row = pl.multiple_of(lax.rem(tile, num_row_tiles(self.num_rows)) * ROWS, ROWS)
        rows, results = (pl.ds(first_row, min(number, ROWS)) for number in (self.num_rows, self.num_results))
        pool, context = kv.at[layer[0]], kv_len[request]
        part = Part.of_share(self.options, context, share, self.tiling, num_new=0 if new_at is None else 1)
        num_parts, turns = self._num_parts(out.shape[-1]), self.tiling.warpgroups
        token = None
        if new_at is not None:
            new_rows, place = q.at[request, head, pl.ds(self.options.num_queries, 2)], (new_at[0][request], head, new_at[1][request])
            is_here = (context > 0) & (share == 0)
            token = NewToken(new_rows, pool.at[0, *place], pool.at[1, *place], is_here, is_here & (first_row == 0))

        for index in range(num_parts * turns):

            @pl.when(lax.axis_index("warpgroup") == index)
            def _multiply(index: int = index) -> None:
                goes_to = out.at[share, request, head, results], weight.at[share, request, head, pl.ds(first_row, ROWS)]
                about_call, about_block = (self.warpgroup, self.tiling, self.options), (part, first_row)
                multiplier = Multiplier(*about_call, *about_block, index // turns, num_parts, index % turns, scales[head], token)
                multiplier.run(q.at[request, head, rows], *goes_to, **scratch)

        @pl.when(lax.axis_index("warpgroup") == num_parts * turns)
        def _fetch() -> None:
            self._fetch(part, lambda side, page: pool.at[side, page, head], lambda place: page_table[request, place], **scratch)

    def _fetch(
        self, part: Part, page_at: Any, page_id: Any, keys_or_totals_or_out: Any, values: Any, arrivals: Any, consumed: Any, **_: Any
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

    def _weighed(self, head_size: int, value_size: int, dtype: jnp.dtype) -> tuple[Any, ...]:
        """What one part of the result's columns hands to another of each tile: what its sums so far are multiplied by, and when weights are there too;
        and room for those, where the keys' tile has none."""
        if self._num_parts(value_size) == 1:
            return ()
        stages, tokens = self.tiling.stages, self.tiling.tokens
        shrinks, arrivals = plgpu.SMEM((stages, ROWS), jnp.float32), plgpu.Barrier(num_barriers=stages)
        room = plgpu.SMEM((stages, ROWS, tokens), dtype, transforms=interleaved(tokens, dtype))
        return (shrinks, arrivals) if head_size - value_size >= tokens else (shrinks, arrivals, room)

    def _num_parts(self, value_size: int) -> int:
        """Warpgroups that share the columns of a result."""
        return -(-value_size // _COLUMNS)
