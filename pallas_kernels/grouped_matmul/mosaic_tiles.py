"""Tiles of weights in `mosaic_gpu`: what a step's are in shared memory, how they are fetched, and how a warpgroup
multiplies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.grouped_matmul.formats import INPUTS, LINE, OUTPUTS, WORDS, Fp8, Int4, Weights, expert_shape, fp8_tile, int4_tile
from pallas_kernels.grouped_matmul.lossless import ROWS as LOSSLESS_ROWS
from pallas_kernels.grouped_matmul.lossless import LosslessWeights, half_of_tile
from pallas_kernels.grouped_matmul.mosaic_unpack import HALF, Halves, unpack_fp8, unpack_int4
from pallas_kernels.grouped_matmul.mosaic_unpack_lossless import unpack_lossless
from pallas_kernels.mosaic.warpgroup import ROWS, TransposedRef, Warpgroup, interleaved

CONSUMERS = OUTPUTS // ROWS  # consumer warpgroups
# rows that leave shared memory for two tiles of packed weights a step: nearly twice the work for each wait and copy
_FEW_ROWS = 16
PACKED_NAMES: dict[type, str] = {Int4: "int4", Fp8: "fp8", LosslessWeights: "lossless"}  # in tuned tilings


class _Bfloat16Tiles:
    """Tiles of bfloat16 weights."""

    step = 64  # inputs of a tile
    shapes = (((CONSUMERS, 64, ROWS), jnp.bfloat16),)  # of a tile in shared memory

    def transforms(self) -> list[Any]:
        return [interleaved(ROWS, jnp.bfloat16)]

    def fetch(self, sources: Any, targets: Any, arrival: Any, expert: Array, output_tile: Array, i: Array) -> None:
        inputs = pl.ds(i * self.step, self.step)
        for half in range(CONSUMERS):
            outputs = pl.ds(output_tile * OUTPUTS + half * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(sources[0].at[expert, inputs, outputs], targets[0].at[half], arrival)

    num_copies = CONSUMERS

    def sum(
        self, warpgroup: Warpgroup, half: Array, num_steps: Array, tiles: Any, rows: Any, wait_for_tiles: Any, release_tiles: Any
    ) -> Array:
        """Weights times rows, over `num_steps` steps. `wait_for_tiles(i)` waits for a step's tiles and returns their
        stage; `release_tiles(i)` frees it."""

        def one(i: Array, multiply: Any) -> None:
            stage = wait_for_tiles(i)
            multiply(TransposedRef(tiles[0].at[stage, half]), rows.at[stage])
            warpgroup.wait_for_products()  # the other warpgroup's product runs meanwhile
            release_tiles(i)

        return warpgroup.sum_of_products((ROWS, rows.shape[1]), num_steps, one)


@dataclass(frozen=True)
class _PackedTiles:
    """Tiles of packed weights and of their scales, several a step."""

    tiles_per_step: int
    num_copies = 2

    @property
    def step(self) -> int:
        return INPUTS * self.tiles_per_step

    def transforms(self) -> list[Any]:
        return [(), ()]

    def fetch(self, sources: Any, targets: Any, arrival: Any, expert: Array, output_tile: Array, i: Array) -> None:
        for source, target in zip(sources, targets, strict=True):
            plgpu.copy_gmem_to_smem(source.at[expert, output_tile, pl.ds(i * self.tiles_per_step, self.tiles_per_step)], target, arrival)


class _Int4Tiles(_PackedTiles):
    @property
    def shapes(self) -> tuple[Any, ...]:
        return ((self.tiles_per_step, OUTPUTS, WORDS), jnp.int32), ((self.tiles_per_step, CONSUMERS, 256), jnp.bfloat16)

    def sum(
        self, warpgroup: Warpgroup, half: Array, num_steps: Array, tiles: Any, rows: Any, wait_for_tiles: Any, release_tiles: Any
    ) -> Array:
        """As `_Bfloat16Tiles.sum`."""

        def one(i: Array, multiply: Any) -> None:
            stage = wait_for_tiles(i)
            for tile in range(self.tiles_per_step):
                words, scale = tiles[0].at[stage, tile, pl.ds(half * ROWS, ROWS)], tiles[1].at[stage, tile, half]
                weights = _halves(int4_tile(words[...], scale[...])) if warpgroup.interpreted else unpack_int4(words, scale)
                _multiply_halves(multiply, weights, rows.at[stage], tile)
            warpgroup.wait_for_products()
            release_tiles(i)

        return warpgroup.sum_of_products((ROWS, rows.shape[1]), num_steps, one)


class _Fp8Tiles(_PackedTiles):
    @property
    def shapes(self) -> tuple[Any, ...]:
        return ((self.tiles_per_step, 2 * OUTPUTS, WORDS), jnp.int32), ((self.tiles_per_step, LINE), jnp.float32)

    def sum(
        self, warpgroup: Warpgroup, half: Array, num_steps: Array, tiles: Any, rows: Any, wait_for_tiles: Any, release_tiles: Any
    ) -> Array:
        """As `_Bfloat16Tiles.sum`. A tile's products are scaled instead of its weights: there are fewer of them, and
        nothing is rounded."""
        shape = ROWS, rows.shape[1]

        def multiply_tile(stage: Array, tile: int) -> Array:
            first, second = (tiles[0].at[stage, tile, pl.ds(part * OUTPUTS + half * ROWS, ROWS)] for part in range(2))
            if warpgroup.interpreted:
                weights = _halves(fp8_tile(jnp.concatenate([first[...], second[...]])))
            else:
                weights = unpack_fp8(first, second)

            def one(_: Array, multiply: Any) -> None:
                _multiply_halves(multiply, weights, rows.at[stage], tile)
                warpgroup.wait_for_products()

            return warpgroup.sum_of_products(shape, 1, one) * tiles[1][stage, tile, 0]

        def one(i: Array, total: Array) -> Array:
            stage = wait_for_tiles(i)
            for tile in range(self.tiles_per_step):
                total += multiply_tile(stage, tile)
            release_tiles(i)
            return total

        return lax.fori_loop(0, num_steps, one, warpgroup.full(shape, 0.0))


class _LosslessTiles(_PackedTiles):
    """A step's tiles come in three copies: bytes, exponents, headers."""

    num_copies = len(LOSSLESS_ROWS)

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(((self.tiles_per_step, rows, WORDS), jnp.int32) for rows in LOSSLESS_ROWS)

    def transforms(self) -> list[Any]:
        return [()] * self.num_copies

    def fetch(self, sources: Any, targets: Any, arrival: Any, expert: Array, output_tile: Array, i: Array) -> None:
        tiles, first = pl.ds(i * self.tiles_per_step, self.tiles_per_step), 0
        for rows, target in zip(LOSSLESS_ROWS, targets, strict=True):
            plgpu.copy_gmem_to_smem(sources[0].at[expert, output_tile, tiles, pl.ds(first, rows)], target, arrival)
            first += rows

    def sum(
        self, warpgroup: Warpgroup, half: Array, num_steps: Array, tiles: Any, rows: Any, wait_for_tiles: Any, release_tiles: Any
    ) -> Array:
        """As `_Bfloat16Tiles.sum`."""

        def one(i: Array, multiply: Any) -> None:
            stage = wait_for_tiles(i)
            for tile in range(self.tiles_per_step):
                first, second = (tiles[0].at[stage, tile, pl.ds(part * OUTPUTS + half * ROWS, ROWS)] for part in range(2))
                of_codes, header = tiles[1].at[stage, tile, pl.ds(half * ROWS, ROWS)], tiles[2].at[stage, tile]
                if warpgroup.interpreted:
                    in_order = jnp.concatenate([first[...], second[...]]), of_codes[...], header[...].reshape(-1)
                    weights = _halves(half_of_tile(*in_order, half))
                else:
                    weights = unpack_lossless(first, second, of_codes, header)
                _multiply_halves(multiply, weights, rows.at[stage], tile)
            warpgroup.wait_for_products()
            release_tiles(i)

        return warpgroup.sum_of_products((ROWS, rows.shape[1]), num_steps, one)


def _halves(weights: Array) -> Halves:
    return lambda: weights[:, :HALF], lambda: weights[:, HALF:]


def _multiply_halves(multiply: Any, weights: Halves, rows: Any, tile: int) -> None:
    for part, of_half in enumerate(weights):
        multiply(of_half(), rows.at[:, pl.ds(tile * INPUTS + part * HALF, HALF)])


WeightTiles: TypeAlias = _Bfloat16Tiles | _Int4Tiles | _Fp8Tiles | _LosslessTiles


def weight_tiles_for(weights: Weights, rows: int) -> WeightTiles:
    """The tiles of such weights in products with tiles of `rows` rows."""
    if isinstance(weights, LosslessWeights):
        return _LosslessTiles(1)  # 24 KB: of two, cards of 12.x have no room for a second stage
    if not isinstance(weights, Int4 | Fp8):
        return _Bfloat16Tiles()
    tiles_per_step = 2 if rows <= _FEW_ROWS and expert_shape(weights)[1] % (2 * INPUTS) == 0 else 1
    return _Int4Tiles(tiles_per_step) if isinstance(weights, Int4) else _Fp8Tiles(tiles_per_step)
