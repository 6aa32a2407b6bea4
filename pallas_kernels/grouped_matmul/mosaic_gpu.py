"""grouped_matmul on NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU.

There are as many thread blocks as multiprocessors. They work through the tiles of the result: 128 outputs of the rows
of one expert. One producer warpgroup has the copy engine fetch tiles of weights and rows, several ahead and across
tiles of the result; two consumer warpgroups multiply, 64 outputs each. The product is transposed, weights times rows.
So an expert's few rows are the narrow factor, and packed weights, which are the first factor, may come from registers:
only packed bytes are read from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.grouped_matmul.formats import OUTPUTS, Weights, expert_shape
from pallas_kernels.grouped_matmul.mosaic_tiles import CONSUMERS, PACKED_NAMES, WeightTiles, weight_tiles_for
from pallas_kernels.grouped_matmul.row_pieces import PieceBounds, RowPiece, num_pieces, piece, piece_bounds, tile_for
from pallas_kernels.mosaic.card import Card, card_for, target_device
from pallas_kernels.mosaic.tuned_tilings import tuned_tiling
from pallas_kernels.mosaic.warpgroup import ROWS, Warpgroup, compiler_params, interleaved

# Tiles begin at multiples of this many rows: the copy engine copies rows by eights,
# and writes zeros past the end of the array.
_ROW_ALIGNMENT = 8


@dataclass(frozen=True)
class GroupedMatmulTiling:
    """Tile sizes and pipeline depth of a call."""

    rows: int  # rows of a tile: a power of 2, 8 to 256; with packed weights up to 128
    stages: int  # tiles of weights, and of rows, that are in flight or in use
    blocks: int | None = None  # None: as many as the GPU has multiprocessors
    splits: int = 1  # splits of the inputs, each summed separately
    # Most tiles of outputs that all rows are multiplied by before the next ones, so that
    # weights are read from memory once.
    output_tiles_together: int = 16


def tiling_for(num_rows: int, weights: Weights) -> GroupedMatmulTiling:
    """The fastest measured tiling on this GPU. Where nothing similar was measured, a tiling that keeps an expert's rows
    together and fills a block's shared memory."""
    num_experts, inputs, outputs = expert_shape(weights)
    name = next((name for kind, name in PACKED_NAMES.items() if isinstance(weights, kind)), "bfloat16")
    shape = {"format": name, "experts": num_experts, "inputs": inputs, "outputs": outputs, "rows": num_rows}
    if best := tuned_tiling("grouped_matmul", shape):
        return GroupedMatmulTiling(**best)
    card = card_for(target_device())
    blocks = card.multiprocessors
    # accumulators are registers
    rows = tile_for(num_rows, num_experts, _ROW_ALIGNMENT, 256 if name == "bfloat16" else 128)
    tiles = weight_tiles_for(weights, rows)
    most_tiles = min(num_rows, num_experts) * (outputs // OUTPUTS) if rows == _ROW_ALIGNMENT else blocks
    # where there are fewer tiles than multiprocessors
    splits = max(1, min(blocks // most_tiles, inputs // tiles.step // 8))
    while (stages := _stages(rows, tiles, splits, card)) < 2:
        rows //= 2
        tiles = weight_tiles_for(weights, rows)
    return GroupedMatmulTiling(rows, min(8, stages), splits=splits)


def _stages(rows: int, tiles: WeightTiles, splits: int, card: Card) -> int:
    """Stages that fit in a block's shared memory."""
    stage = rows * tiles.step * 2 + sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in tiles.shapes)
    return (card.shared_memory - rows * OUTPUTS * _out_dtype(splits).itemsize - 2048) // stage


def _out_dtype(splits: int) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16 if splits == 1 else jnp.float32)


def grouped_matmul(
    x: BFloat16[Array, "T D"],
    weights: Weights,
    group_sizes: Int[Array, " E"],
    *,
    tiling: GroupedMatmulTiling | None = None,
    interpreted: bool = False,
) -> BFloat16[Array, "T F"]:
    """See op.py. `interpreted`: run by JAX's interpreter on a CPU."""
    num_rows, (_, inputs, outputs) = len(x), expert_shape(weights)
    tiling, card = tiling or tiling_for(num_rows, weights), card_for(target_device())
    x = jnp.pad(x, ((0, max(tiling.rows - num_rows, -num_rows % _ROW_ALIGNMENT)), (0, 0)))  # rows are copied by eights
    blocks = tiling.blocks or card.multiprocessors
    body = _GroupedMatmulKernel(
        Warpgroup(interpreted, card.has_wgmma), tiling, blocks, weight_tiles_for(weights, tiling.rows), len(x), inputs, outputs
    )
    out = body.call(x, weights, piece_bounds(group_sizes, len(x), tiling.rows, _ROW_ALIGNMENT))[:, :num_rows]
    return out[0] if tiling.splits == 1 else out.sum(0).astype(x.dtype)


class _Tile(NamedTuple):
    """A tile of the result."""

    piece: RowPiece
    outputs: Array  # index of the tile of outputs
    split: Array
    first_step: Array
    num_steps: Array


@dataclass(frozen=True)
class _GroupedMatmulKernel:
    """The kernel, with everything that is known at compile time."""

    warpgroup: Warpgroup
    tiling: GroupedMatmulTiling
    blocks: int
    tiles: WeightTiles
    num_rows: int
    inputs: int
    outputs: int

    def call(self, x: Array, weights: Weights, work: PieceBounds) -> Array:
        tiling, tiles, bfloat16 = self.tiling, self.tiles, jnp.bfloat16
        shared = [
            plgpu.SMEM((tiling.stages, *shape), dtype, transforms=transforms)
            for (shape, dtype), transforms in zip(tiles.shapes, tiles.transforms(), strict=True)
        ]
        scratch = {
            "weight_tiles": shared,
            "row_tiles": plgpu.SMEM((tiling.stages, tiling.rows, tiles.step), bfloat16, transforms=interleaved(tiles.step, bfloat16)),
            "out_tiles": plgpu.SMEM((CONSUMERS, tiling.rows, ROWS), _out_dtype(tiling.splits)),
            "arrivals": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=1 + tiles.num_copies),
            "consumed": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=CONSUMERS),
        }
        kernel = self.warpgroup.kernel(
            self._kernel,
            "grouped_matmul",
            out_type=jax.ShapeDtypeStruct((tiling.splits, len(x), self.outputs), _out_dtype(tiling.splits)),
            grid=(self.blocks,),
            grid_names=("block",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=compiler_params(),
        )
        return kernel(x, weights if isinstance(weights, tuple) else (weights,), work)

    def _kernel(self, x: Any, weights: Any, work: PieceBounds, out: Any, **scratch: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < CONSUMERS)(lambda: self._multiply(warpgroup, work, out, **scratch))
        pl.when(warpgroup == CONSUMERS)(lambda: self._fetch(x, weights, work, **scratch))

    def _for_each_tile(self, work: PieceBounds, one: Callable[[_Tile, Array], None]) -> Array:
        """Calls one(tile, number of steps of all tiles before it) for each tile of the result that this block owns.
        Returns the number of all steps."""
        num_output_tiles, num_steps, splits = self.outputs // OUTPUTS, self.inputs // self.tiles.step, self.tiling.splits
        width = max(n for n in range(1, self.tiling.output_tiles_together + 1) if num_output_tiles % n == 0)
        block, blocks = lax.axis_index("block"), self.blocks
        num_owned, num_all = num_pieces(work, self.num_rows, self.tiling.rows, _ROW_ALIGNMENT)
        num_tiles = lax.div(num_all * (num_output_tiles * splits) - block + (blocks - 1), blocks)

        def one_of_block(i: Array, steps: Array) -> Array:
            place = block + i * blocks
            split, place = lax.rem(place, splits), lax.div(place, splits)
            group = lax.div(place, num_all * width)
            within = place - group * (num_all * width)
            piece_id, output_tile = lax.div(within, width), group * width + lax.rem(within, width)
            first, end = (lax.div(n * num_steps, splits) for n in (split, split + 1))
            steps_here = jnp.where(piece_id < num_owned, end - first, 0)
            one(_Tile(piece(work, piece_id, self.num_rows, self.tiling.rows, _ROW_ALIGNMENT), output_tile, split, first, steps_here), steps)
            return steps + steps_here

        return lax.fori_loop(0, num_tiles, one_of_block, jnp.int32(0))

    def _fetch(
        self, x: Any, weights: Any, work: PieceBounds, *, weight_tiles: Any, row_tiles: Any, arrivals: Any, consumed: Any, **_: Any
    ) -> None:
        """Fetches the tiles, as many ahead as there are stages."""
        plgpu.set_max_registers(40, action="decrease")
        stages, step = self.tiling.stages, self.tiles.step

        def fetch(tile: _Tile, steps: Array) -> None:
            rows, expert = pl.ds(tile.piece.start, self.tiling.rows), tile.piece.expert

            def one(i: Array, _: None) -> None:
                stage = lax.rem(steps + i, stages)
                pl.when(steps + i >= stages)(lambda: plgpu.barrier_wait(consumed.at[stage]))
                targets, arrival, place = [t.at[stage] for t in weight_tiles], arrivals.at[stage], tile.first_step + i
                self.tiles.fetch(weights, targets, arrival, expert, tile.outputs, place)
                plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(place * step, step)], row_tiles.at[stage], arrival)

            lax.fori_loop(0, tile.num_steps, one, None)

        steps = self._for_each_tile(work, fetch)

        @pl.loop(jnp.maximum(steps - stages, 0), steps)  # no barrier may be left in the middle of a phase
        def _drain(i: Array) -> None:
            plgpu.barrier_wait(consumed.at[lax.rem(i, stages)])

    def _multiply(
        self,
        half: Array,
        work: PieceBounds,
        out: Any,
        *,
        weight_tiles: Any,
        row_tiles: Any,
        out_tiles: Any,
        arrivals: Any,
        consumed: Any,
    ) -> None:
        """Multiplies the tiles as they arrive, for one half of their outputs."""
        plgpu.set_max_registers(232, action="increase")
        stages = self.tiling.stages

        def multiply(tile: _Tile, steps: Array) -> None:
            def wait_for_tiles(i: Array) -> Array:
                stage = lax.rem(steps + i, stages)
                plgpu.barrier_wait(arrivals.at[stage])
                return stage

            def release_tiles(i: Array) -> None:
                plgpu.barrier_arrive(consumed.at[lax.rem(steps + i, stages)])

            total = self.tiles.sum(self.warpgroup, half, tile.num_steps, weight_tiles, row_tiles, wait_for_tiles, release_tiles)
            out_tile = out_tiles.at[half]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the result before this one has left
            self.warpgroup.store_transposed(out_tile, total.astype(out_tile.dtype))
            plgpu.commit_smem()
            outputs = pl.ds(tile.outputs * OUTPUTS + half * ROWS, ROWS)
            self._store(out_tile, out.at[tile.split, :, outputs], tile.piece)

        self._for_each_tile(work, multiply)
        plgpu.wait_smem_to_gmem(0)

    def _store(self, tile: Any, out: Any, piece: RowPiece) -> None:
        """Writes the piece's rows. Copies have sizes that are known at compile time: powers of 2 add up to any
        number."""
        place, size = piece.skip, self.tiling.rows
        while size:
            part = piece.size & size

            @pl.when(part != 0)
            def _copy(size: int = size, place: Array = place) -> None:
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(place, size)], out.at[pl.ds(piece.start + place, size)])

            place += part
            size //= 2
