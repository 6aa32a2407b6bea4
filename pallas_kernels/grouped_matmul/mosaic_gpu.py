"""grouped_matmul on NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU.

As many blocks of threads as there are multiprocessors take turns at the tiles of the result: 128 outputs of the rows of one expert. One warpgroup
has the copy engine bring the tiles of weights and rows, several ahead and across tiles of the result; two multiply, 64 outputs each. The
product is transposed, weights times rows: an expert's few rows then are the narrow factor, and packed weights, which are the first one, may
come from registers, so that what is read from memory is packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.grouped_matmul.formats import INPUTS, LINE, OUTPUTS, WORDS, Fp8, Int4, Weights, fp8_tile, int4_tile, shape_of
from pallas_kernels.grouped_matmul.mosaic_unpack import HALF, Halves, fp8_in_registers, int4_in_registers
from pallas_kernels.grouped_matmul.work import Piece, Work, num_pieces, piece, tile_for, work_for
from pallas_kernels.mosaic.card import Card, card_of, compiled_for
from pallas_kernels.mosaic.tuned import tuned
from pallas_kernels.mosaic.warpgroup import ROWS, Turned, Warpgroup, compiler_params, interleaved

_MULTIPLIERS = OUTPUTS // ROWS  # warpgroups
_FEW = 16  # rows: that leave shared memory for two tiles of packed weights a step, which is then nearly twice the work for each wait and each copy
_SMALLEST = 8  # rows of a tile: tiles begin at multiples of as many, since the copy engine finds rows by eights, and zeros past the eighth


@dataclass(frozen=True)
class Tiling:
    """How a call is cut up."""

    rows: int  # of a tile: a power of 2, 8 to 256; packed weights: to 128
    stages: int  # tiles of weights, and of rows, on their way or in use
    blocks: int | None = None  # where not given, as many as the card has multiprocessors
    splits: int = 1  # shares of the inputs, each summed by itself
    together: int = 16  # tiles of outputs, at most, that all rows are multiplied by before the next ones: weights are read from memory once


def tiling_for(num_rows: int, weights: Weights) -> Tiling:
    """What was the quickest on this card; where nothing like it was measured, a tiling that keeps an expert's rows together and fills a
    block's shared memory."""
    num_experts, inputs, outputs = shape_of(weights)
    name = "int4" if isinstance(weights, Int4) else "fp8" if isinstance(weights, Fp8) else "bfloat16"
    shape = {"format": name, "experts": num_experts, "inputs": inputs, "outputs": outputs, "rows": num_rows}
    if best := tuned("grouped_matmul", shape):
        return Tiling(**best)
    card = card_of(compiled_for())
    blocks = card.multiprocessors
    rows = tile_for(num_rows, num_experts, _SMALLEST, 256 if name == "bfloat16" else 128)  # accumulators are registers
    tiles = tiles_of(weights, rows)
    most_tiles = min(num_rows, num_experts) * (outputs // OUTPUTS) if rows == _SMALLEST else blocks
    splits = max(1, min(blocks // most_tiles, inputs // tiles.step // 8))  # where there are fewer tiles than multiprocessors
    while (stages := _stages(rows, tiles, splits, card)) < 2:
        rows //= 2
        tiles = tiles_of(weights, rows)
    return Tiling(rows, min(8, stages), splits=splits)


def _stages(rows: int, tiles: Tiles, splits: int, card: Card) -> int:
    """That a block's shared memory has room for."""
    stage = rows * tiles.step * 2 + sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in tiles.shapes)
    return (card.shared_memory - rows * OUTPUTS * _out_dtype(splits).itemsize - 2048) // stage


def _out_dtype(splits: int) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16 if splits == 1 else jnp.float32)


def grouped_matmul(
    x: BFloat16[Array, "T D"],
    weights: Weights,
    group_sizes: Int[Array, " E"],
    *,
    tiling: Tiling | None = None,
    interpreted: bool = False,
) -> BFloat16[Array, "T F"]:
    """See op.py. `interpreted`: by JAX's interpreter on a CPU."""
    num_rows, (_, inputs, outputs) = len(x), shape_of(weights)
    tiling, card = tiling or tiling_for(num_rows, weights), card_of(compiled_for())
    x = jnp.pad(x, ((0, max(tiling.rows - num_rows, -num_rows % _SMALLEST)), (0, 0)))  # rows are copied by eights
    blocks = tiling.blocks or card.multiprocessors
    body = _Body(Warpgroup(interpreted, card.has_wgmma), tiling, blocks, tiles_of(weights, tiling.rows), len(x), inputs, outputs)
    out = body.call(x, weights, work_for(group_sizes, len(x), tiling.rows, _SMALLEST))[:, :num_rows]
    return out[0] if tiling.splits == 1 else out.sum(0).astype(x.dtype)


class _Plain:
    """Tiles of bfloat16 weights."""

    step = 64  # inputs of a tile
    shapes = (((_MULTIPLIERS, 64, ROWS), jnp.bfloat16),)  # of a tile in shared memory

    def transforms(self) -> list[Any]:
        return [interleaved(ROWS, jnp.bfloat16)]

    def fetch(self, sources: Any, targets: Any, arrival: Any, expert: Array, output_tile: Array, i: Array) -> None:
        inputs = pl.ds(i * self.step, self.step)
        for half in range(_MULTIPLIERS):
            outputs = pl.ds(output_tile * OUTPUTS + half * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(sources[0].at[expert, inputs, outputs], targets[0].at[half], arrival)

    num_copies = _MULTIPLIERS

    def sum(self, warpgroup: Warpgroup, half: Array, num_steps: Array, tiles: Any, rows: Any, arrived: Any, done: Any) -> Array:
        """Weights times rows, over so many steps: `arrived(i)` waits for a step's tiles and gives their place, `done(i)` gives it back."""

        def one(i: Array, multiply: Any) -> None:
            stage = arrived(i)
            multiply(Turned(tiles[0].at[stage, half]), rows.at[stage])
            warpgroup.wait_for_products()  # the other warpgroup's product is under way
            done(i)

        return warpgroup.sum_of_products((ROWS, rows.shape[1]), num_steps, one)


@dataclass(frozen=True)
class _Packed:
    """Tiles of packed weights, and of their scales: so many at once."""

    together: int
    num_copies = 2

    @property
    def step(self) -> int:
        return INPUTS * self.together

    def transforms(self) -> list[Any]:
        return [(), ()]

    def fetch(self, sources: Any, targets: Any, arrival: Any, expert: Array, output_tile: Array, i: Array) -> None:
        for source, target in zip(sources, targets, strict=True):
            plgpu.copy_gmem_to_smem(source.at[expert, output_tile, pl.ds(i * self.together, self.together)], target, arrival)


class _OfInt4(_Packed):
    @property
    def shapes(self) -> tuple[Any, ...]:
        return ((self.together, OUTPUTS, WORDS), jnp.int32), ((self.together, _MULTIPLIERS, 256), jnp.bfloat16)

    def sum(self, warpgroup: Warpgroup, half: Array, num_steps: Array, tiles: Any, rows: Any, arrived: Any, done: Any) -> Array:
        """As `_Plain.sum`."""

        def one(i: Array, multiply: Any) -> None:
            stage = arrived(i)
            for tile in range(self.together):
                words, scale = tiles[0].at[stage, tile, pl.ds(half * ROWS, ROWS)], tiles[1].at[stage, tile, half]
                weights = _halves(int4_tile(words[...], scale[...])) if warpgroup.interpreted else int4_in_registers(words, scale)
                _multiply_halves(multiply, weights, rows.at[stage], tile)
            warpgroup.wait_for_products()
            done(i)

        return warpgroup.sum_of_products((ROWS, rows.shape[1]), num_steps, one)


class _OfFp8(_Packed):
    @property
    def shapes(self) -> tuple[Any, ...]:
        return ((self.together, 2 * OUTPUTS, WORDS), jnp.int32), ((self.together, LINE), jnp.float32)

    def sum(self, warpgroup: Warpgroup, half: Array, num_steps: Array, tiles: Any, rows: Any, arrived: Any, done: Any) -> Array:
        """As `_Plain.sum`. A tile's products are scaled rather than its weights: they are fewer, and nothing is rounded."""
        shape = ROWS, rows.shape[1]

        def of_tile(stage: Array, tile: int) -> Array:
            first, second = (tiles[0].at[stage, tile, pl.ds(part * OUTPUTS + half * ROWS, ROWS)] for part in range(2))
            if warpgroup.interpreted:
                weights = _halves(fp8_tile(jnp.concatenate([first[...], second[...]])))
            else:
                weights = fp8_in_registers(first, second)

            def one(_: Array, multiply: Any) -> None:
                _multiply_halves(multiply, weights, rows.at[stage], tile)
                warpgroup.wait_for_products()

            return warpgroup.sum_of_products(shape, 1, one) * tiles[1][stage, tile, 0]

        def one(i: Array, total: Array) -> Array:
            stage = arrived(i)
            for tile in range(self.together):
                total += of_tile(stage, tile)
            done(i)
            return total

        return lax.fori_loop(0, num_steps, one, warpgroup.full(shape, 0.0))


def _halves(weights: Array) -> Halves:
    return lambda: weights[:, :HALF], lambda: weights[:, HALF:]


def _multiply_halves(multiply: Any, weights: Halves, rows: Any, tile: int) -> None:
    for part, of_half in enumerate(weights):
        multiply(of_half(), rows.at[:, pl.ds(tile * INPUTS + part * HALF, HALF)])


Tiles: TypeAlias = _Plain | _OfInt4 | _OfFp8


def tiles_of(weights: Weights, rows: int) -> Tiles:
    """How such weights are multiplied by tiles of so many rows."""
    together = 2 if rows <= _FEW and shape_of(weights)[1] % (2 * INPUTS) == 0 else 1
    return _OfInt4(together) if isinstance(weights, Int4) else _OfFp8(together) if isinstance(weights, Fp8) else _Plain()


class _Tile(NamedTuple):
    """Of the result."""

    piece: Piece
    outputs: Array  # which tile of them
    split: Array
    first_step: Array
    num_steps: Array


@dataclass(frozen=True)
class _Body:
    """The kernel, of everything that is known when it is compiled."""

    warpgroup: Warpgroup
    tiling: Tiling
    blocks: int
    tiles: Tiles
    num_rows: int
    inputs: int
    outputs: int

    def call(self, x: Array, weights: Weights, work: Work) -> Array:
        tiling, tiles, bfloat16 = self.tiling, self.tiles, jnp.bfloat16
        shared = [
            plgpu.SMEM((tiling.stages, *shape), dtype, transforms=transforms)
            for (shape, dtype), transforms in zip(tiles.shapes, tiles.transforms(), strict=True)
        ]
        scratch = {
            "weight_tiles": shared,
            "row_tiles": plgpu.SMEM((tiling.stages, tiling.rows, tiles.step), bfloat16, transforms=interleaved(tiles.step, bfloat16)),
            "out_tiles": plgpu.SMEM((_MULTIPLIERS, tiling.rows, ROWS), _out_dtype(tiling.splits)),
            "arrivals": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=1 + tiles.num_copies),
            "consumed": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=_MULTIPLIERS),
        }
        kernel = self.warpgroup.kernel(
            self._kernel,
            "grouped_matmul",
            out_type=jax.ShapeDtypeStruct((tiling.splits, len(x), self.outputs), _out_dtype(tiling.splits)),
            grid=(self.blocks,),
            grid_names=("block",),
            num_threads=_MULTIPLIERS + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=compiler_params(),
        )
        return kernel(x, weights if isinstance(weights, tuple) else (weights,), work)

    def _kernel(self, x: Any, weights: Any, work: Work, out: Any, **scratch: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < _MULTIPLIERS)(lambda: self._multiply(warpgroup, work, out, **scratch))
        pl.when(warpgroup == _MULTIPLIERS)(lambda: self._fetch(x, weights, work, **scratch))

    def _for_each_tile(self, work: Work, one: Callable[[_Tile, Array], None]) -> Array:
        """Calls one(tile, steps of all tiles before it) for each tile of the result that is this block's; gives the number of all steps."""
        num_output_tiles, num_steps, splits = self.outputs // OUTPUTS, self.inputs // self.tiles.step, self.tiling.splits
        together = max(n for n in range(1, self.tiling.together + 1) if num_output_tiles % n == 0)
        block, blocks = lax.axis_index("block"), self.blocks
        num_owned, num_all = num_pieces(work, self.num_rows, self.tiling.rows, _SMALLEST)
        num_tiles = lax.div(num_all * (num_output_tiles * splits) - block + (blocks - 1), blocks)

        def of_block(i: Array, steps: Array) -> Array:
            place = block + i * blocks
            split, place = lax.rem(place, splits), lax.div(place, splits)
            group = lax.div(place, num_all * together)
            within = place - group * (num_all * together)
            piece_id, output_tile = lax.div(within, together), group * together + lax.rem(within, together)
            first, end = (lax.div(n * num_steps, splits) for n in (split, split + 1))
            steps_here = jnp.where(piece_id < num_owned, end - first, 0)
            one(_Tile(piece(work, piece_id, self.num_rows, self.tiling.rows, _SMALLEST), output_tile, split, first, steps_here), steps)
            return steps + steps_here

        return lax.fori_loop(0, num_tiles, of_block, jnp.int32(0))

    def _fetch(
        self, x: Any, weights: Any, work: Work, *, weight_tiles: Any, row_tiles: Any, arrivals: Any, consumed: Any, **_: Any
    ) -> None:
        """Bring the tiles, as many ahead as there are stages."""
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
        work: Work,
        out: Any,
        *,
        weight_tiles: Any,
        row_tiles: Any,
        out_tiles: Any,
        arrivals: Any,
        consumed: Any,
    ) -> None:
        """Multiply the tiles as they come, for one half of their outputs."""
        plgpu.set_max_registers(232, action="increase")
        stages = self.tiling.stages

        def multiply(tile: _Tile, steps: Array) -> None:
            def arrived(i: Array) -> Array:
                stage = lax.rem(steps + i, stages)
                plgpu.barrier_wait(arrivals.at[stage])
                return stage

            def done(i: Array) -> None:
                plgpu.barrier_arrive(consumed.at[lax.rem(steps + i, stages)])

            total = self.tiles.sum(self.warpgroup, half, tile.num_steps, weight_tiles, row_tiles, arrived, done)
            out_tile = out_tiles.at[half]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the result before this one
            self.warpgroup.store_transposed(out_tile, total.astype(out_tile.dtype))
            plgpu.commit_smem()
            outputs = pl.ds(tile.outputs * OUTPUTS + half * ROWS, ROWS)
            self._store(out_tile, out.at[tile.split, :, outputs], tile.piece)

        self._for_each_tile(work, multiply)
        plgpu.wait_smem_to_gmem(0)

    def _store(self, tile: Any, out: Any, piece: Piece) -> None:
        """Write the piece's rows. Copies are of sizes that are known before: powers of 2 add up to any."""
        place, size = piece.skip, self.tiling.rows
        while size:
            part = piece.size & size

            @pl.when(part != 0)
            def _copy(size: int = size, place: Array = place) -> None:
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(place, size)], out.at[pl.ds(piece.start + place, size)])

            place += part
            size //= 2
