"""A warpgroup's products by instructions of its four warps (ldmatrix, mma.sync), which every NVIDIA GPU that runs
Mosaic GPU kernels has. Hopper's own (wgmma) exists on no other; that of compute capability 10.0 (tcgen05) neither on
9.0 nor on 12.0.

Each warp has 16 of the 64 rows. Its accumulators and first factor have wgmma's register layout, so code around a
product need not know which instructions compute it. One instruction loads blocks of 16 x 16 numbers of 16 bits from
shared memory. Each of its 32 threads gives the address of 8 numbers in a row; these come from different banks, since
the tiles' rows are interleaved.

`Warp` is the interface: `kernel_warp` implements it in a kernel, tests implement it in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

BLOCK = 16  # rows and columns that one instruction loads; each of two products has such a block
TILE_ROWS = 8  # of interleaved shared memory; see `warpgroup.interleaved`
NUMBER = 2  # bytes

Number = Any  # an integer of each thread, with the operators of one
Registers = tuple[Any, ...]


class Warp(Protocol):
    """The instructions of a warp."""

    @property
    def lane(self) -> Number:
        """0 to 31."""

    @property
    def warp(self) -> Number:
        """0 to 3, of its warpgroup."""

    def load(self, memory: Any, offset: Number, num_matrices: int, *, is_transposed: bool) -> Registers:
        """One register of each of `num_matrices` 8 x 8 matrices. Thread 8 i + j gives the offset, in bytes, of row j of
        matrix i."""

    def multiply(self, total: Registers, a: Registers, b: Registers) -> Registers:
        """total[16, 8] + a[16, 16] @ b[16, 8], in 4, 4 and 2 registers."""


@dataclass(frozen=True)
class InterleavedTiles:
    """[R, C] in shared memory, in tiles of 8 rows, whose parts of 16 bytes are interleaved within `swizzle` bytes of a
    row."""

    memory: Any
    swizzle: int  # 32, 64 or 128
    row_stride: int  # bytes from a tile to the one below it
    column_stride: int  # bytes to the tile beside it

    def block(self, warp: Warp, row: int, column: int, *, down_first: bool, by_warp: str | None = None) -> Number:
        """Offset of the 8 numbers whose address this thread gives, for the block that begins there. Of its four
        matrices the second is below the first or beside it. `by_warp`: each warp's block is that many blocks further,
        in 'rows' or 'columns'."""
        lane, part = warp.lane, column * NUMBER % self.swizzle
        index, place = lane >> 3, (lane & 7) * self.swizzle
        is_below, is_beside = (index & 1, index >> 1) if down_first else (index >> 1, index & 1)
        # A tile begins at a multiple of the interleaving, so a part's position is mixed with its row alone.
        within = place + (((place >> 7) ^ is_beside) << 4)
        offset = is_below * self.row_stride
        if by_warp == "rows":
            offset = offset + warp.warp * (BLOCK // TILE_ROWS * self.row_stride)
        if by_warp == "columns":
            within = within ^ (warp.warp << 5)
        return (within ^ part) + offset + (row // TILE_ROWS * self.row_stride + column * NUMBER // self.swizzle * self.column_stride)


@dataclass(frozen=True)
class RegisterFactor:
    """A first factor, [64, K]: four registers for each of a warp's 16 x 16 blocks."""

    blocks: Sequence[Registers]


@dataclass(frozen=True)
class SharedMemoryFactor:
    """A first factor, [64, K], or a transposed [K, 64]."""

    tiles: InterleavedTiles
    is_transposed: bool = False

    def block(self, warp: Warp, k: int) -> Registers:
        if self.is_transposed:
            offset = self.tiles.block(warp, k, 0, down_first=False, by_warp="columns")
        else:
            offset = self.tiles.block(warp, 0, k, down_first=True, by_warp="rows")
        return warp.load(self.tiles.memory, offset, 4, is_transposed=self.is_transposed)


def add_product(
    warp: Warp,
    totals: Sequence[Registers],
    a: RegisterFactor | SharedMemoryFactor,
    b: InterleavedTiles,
    depth: int,
    *,
    b_is_transposed: bool,
) -> list[Registers]:
    """totals[64, X] + a[64, depth] @ b[depth, X], or @ b[X, depth].T: a warp's four registers for each 8 columns."""
    totals = list(totals)
    for k in range(0, depth, BLOCK):
        block = a.blocks[k // BLOCK] if isinstance(a, RegisterFactor) else a.block(warp, k)
        for place in range(0, len(totals), 2):
            x, num_products = place * TILE_ROWS, min(2, len(totals) - place)
            row, column = (x, k) if b_is_transposed else (k, x)
            offset = b.block(warp, row, column, down_first=not b_is_transposed)
            columns = warp.load(b.memory, offset, 2 * num_products, is_transposed=not b_is_transposed)
            for i in range(num_products):
                totals[place + i] = warp.multiply(totals[place + i], block, columns[2 * i : 2 * i + 2])
    return totals
