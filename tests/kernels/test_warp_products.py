"""Products by warp-level instructions: the order of their steps, on a machine of NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pallas_kernels.mosaic.warp_products import InterleavedTiles, RegisterFactor, SharedMemoryFactor, add_product
from tests.ptx.instructions import matrix_of, product

LANES, WARPS = 32, 4
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Shared:
    """float16 [R, C] as the copy engine lays it: from `start` on in tiles of 8 rows, parts of 16 bytes interleaved by the address they have."""

    words: np.ndarray  # by address / 2; NaN where nothing lies
    start: int
    tiles: InterleavedTiles

    @classmethod
    def of(cls, matrix: np.ndarray, swizzle: int, start: int) -> Shared:
        rows, columns = matrix.shape
        wide = swizzle // 2
        tile = 8 * swizzle
        words = np.full((start + 2 * matrix.size) // 2 + 512, np.nan, np.float16)
        for row, column in np.ndindex(rows, columns):
            address = start + (row // 8 * (columns // wide) + column // wide) * tile + row % 8 * swizzle + column % wide * 2
            words[(address ^ (address >> 3 & swizzle - 16)) // 2] = matrix[row, column]
        return cls(words, start, InterleavedTiles("unset", swizzle, columns // wide * tile, tile))


class NumpyMachine:
    """Four warps at a time: registers are [warps, lanes, 2 halves] or [warps, lanes]."""

    def __init__(self) -> None:
        self.lane, self.warp = np.arange(LANES)[None], np.arange(WARPS)[:, None]

    def load(self, memory: Shared, offset, num_matrices, *, is_transposed):
        address = np.broadcast_to(memory.start + offset, (WARPS, LANES))
        assert not (address % 16).any(), "rows of 16 bytes"
        found = []
        for i in range(num_matrices):
            for_rows = address[:, 8 * i : 8 * i + 8]
            banks = (for_rows // 4 % 32) // 4  # that 16 bytes lie in, four of them
            assert all(len(set(row)) == 8 for row in banks), "no two rows in the same banks"
            rows = memory.words[for_rows[..., None] // 2 + np.arange(8)]
            found.append(matrix_of(rows, is_transposed=is_transposed))
        return tuple(found)

    def multiply(self, total, a, b):
        return tuple(before + part for before, part in zip(total, product(a, b), strict=True))


def random(*shape: int) -> np.ndarray:
    return RNG.integers(-8, 9, shape).astype(np.float16)


def from_registers(totals) -> np.ndarray:
    """[64, X] of what accumulators hold."""
    columns = []
    for numbers in totals:
        halves = [np.stack(numbers[i : i + 2], -1).reshape(WARPS, 8, 8) for i in (0, 2)]
        columns.append(np.concatenate(halves, axis=1).reshape(64, 8))
    return np.concatenate(columns, axis=1)


def to_registers(matrix: np.ndarray) -> RegisterFactor:
    """[64, K] as it lies in registers after the softmax: as accumulators do."""
    of_warps = matrix.reshape(WARPS, 16, -1)
    blocks = [
        tuple(of_warps[:, i % 2 * 8 :, k + i // 2 * 8 :][:, :8, :8].reshape(WARPS, LANES, 2) for i in range(4))
        for k in range(0, matrix.shape[1], 16)
    ]
    return RegisterFactor(blocks)


def in_memory(matrix: np.ndarray, swizzle: int, start: int = 4096) -> InterleavedTiles:
    shared = Shared.of(matrix, swizzle, start)
    return InterleavedTiles(shared, swizzle, shared.tiles.row_stride, shared.tiles.column_stride)


def zeros(columns: int):
    return [tuple(np.zeros((WARPS, LANES), np.float32) for _ in range(4)) for _ in range(columns // 8)]


@pytest.mark.parametrize(("depth", "swizzle"), [(64, 128), (128, 128), (96, 64), (80, 32), (576, 128)])
@pytest.mark.parametrize("columns", [8, 64, 128])
def test_a_product_of_shared_memory_with_a_transposed_one(depth, swizzle, columns):
    a, b = random(64, depth), random(columns, depth)
    totals = add_product(
        NumpyMachine(), zeros(columns), SharedMemoryFactor(in_memory(a, swizzle)), in_memory(b, swizzle), depth, b_is_transposed=True
    )
    np.testing.assert_array_equal(from_registers(totals), a.astype(np.float32) @ b.T.astype(np.float32))


@pytest.mark.parametrize(("columns", "swizzle"), [(64, 128), (256, 128), (96, 64), (80, 32), (16, 32)])
@pytest.mark.parametrize("depth", [64, 128])
def test_a_product_of_registers_with_shared_memory_adds_to_what_there_is(columns, swizzle, depth):
    a, b = random(64, depth), random(depth, columns)
    before = [tuple(np.full((WARPS, LANES), 3.0, np.float32) for _ in range(4)) for _ in range(columns // 8)]
    totals = add_product(NumpyMachine(), before, to_registers(a), in_memory(b, swizzle), depth, b_is_transposed=False)
    np.testing.assert_array_equal(from_registers(totals), 3 + a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("columns", [8, 16, 128])
def test_a_product_whose_first_factor_lies_transposed(columns):
    a, b = random(64, 64), random(columns, 64)
    totals = add_product(
        NumpyMachine(), zeros(columns), SharedMemoryFactor(in_memory(a, 128), True), in_memory(b, 128), 64, b_is_transposed=True
    )
    np.testing.assert_array_equal(from_registers(totals), a.T.astype(np.float32) @ b.T.astype(np.float32))


def test_what_is_loaded_lies_anywhere_that_tiles_may_begin():
    a, b = random(64, 64), random(64, 64)
    tiles = SharedMemoryFactor(in_memory(a, 128, start=3 * 1024)), in_memory(b, 128, start=17 * 1024)
    totals = add_product(NumpyMachine(), zeros(64), *tiles, 64, b_is_transposed=True)
    np.testing.assert_array_equal(from_registers(totals), a.astype(np.float32) @ b.T.astype(np.float32))
