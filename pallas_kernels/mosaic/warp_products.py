"""A warpgroup's products by instructions of its four warps (ldmatrix, mma.sync), which every NVIDIA GPU that runs Mosaic GPU's kernels has.
Hopper's own (wgmma) is on no other, compute capability 10.0's own (tcgen05) on neither 9.0 nor 12.0.

Each warp has 16 of the 64 rows. A warp's accumulators and first factor lie in its registers as wgmma's do, so what is made of the one or for the
other need not know which products are meant. Blocks of 16 x 16 numbers of 16 bits come from shared memory in a single instruction, whose 32
threads each give the address of 8 numbers in a row; these come from different banks, since the tiles' rows are interleaved.

Written for any machine that loads and multiplies so: a kernel's is `warp_machine`, tests have another, of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

BLOCK = 16  # rows and columns of what one instruction loads; two products have such a block each
TILE_ROWS = 8  # of interleaved shared memory; see `warpgroup.interleaved`
NUMBER = 2  # bytes

Number = Any  # an integer of each thread, with the operators of one
Registers = tuple[Any, ...]


class Machine(Protocol):
    """What a warp does."""

    @property
    def lane(self) -> Number:
        """0 to 31."""

    @property
    def warp(self) -> Number:
        """0 to 3, of its warpgroup."""

    def load(self, memory: Any, offset: Number, num_matrices: int, *, is_transposed: bool) -> Registers:
        """One register of each of so many 8 x 8 matrices; thread 8 i + j gives the offset, in bytes, of row j of matrix i."""

    def multiply(self, total: Registers, a: Registers, b: Registers) -> Registers:
        """total[16, 8] + a[16, 16] @ b[16, 8], in 4, 4 and 2 registers."""


@dataclass(frozen=True)
class Tiles:
    """[R, C] in shared memory, in tiles of 8 rows, whose parts of 16 bytes are interleaved within so many bytes of a row."""

    memory: Any
    swizzle: int  # 32, 64 or 128
    below: int  # bytes from a tile to the one below it
    beside: int  # bytes to the one beside it

    def block(self, machine: Machine, row: int, column: int, *, down_first: bool, by_warp: str | None = None) -> Number:
        """Offset of the 8 numbers that this thread gives the address of, for the block that begins there: of its four matrices the second is below
        the first or beside it. `by_warp`: each warp's block is that many blocks further, in 'rows' or 'columns'."""
        lane, part = machine.lane, column * NUMBER % self.swizzle
        index, place = lane >> 3, (lane & 7) * self.swizzle
        is_below, is_beside = (index & 1, index >> 1) if down_first else (index >> 1, index & 1)
        # A tile begins at a multiple of what its rows are interleaved over, so what a part's place is mixed with is of its row alone.
        within = place + (((place >> 7) ^ is_beside) << 4)
        offset = is_below * self.below
        if by_warp == "rows":
            offset = offset + machine.warp * (BLOCK // TILE_ROWS * self.below)
        if by_warp == "columns":
            within = within ^ (machine.warp << 5)
        return (within ^ part) + offset + (row // TILE_ROWS * self.below + column * NUMBER // self.swizzle * self.beside)


@dataclass(frozen=True)
class InRegisters:
    """A first factor, [64, K]: of each warp's 16 x 16 blocks the four registers."""

    blocks: Sequence[Registers]


@dataclass(frozen=True)
class InMemory:
    """A first factor, [64, K], or [K, 64] that is transposed."""

    tiles: Tiles
    is_transposed: bool = False

    def block(self, machine: Machine, k: int) -> Registers:
        if self.is_transposed:
            offset = self.tiles.block(machine, k, 0, down_first=False, by_warp="columns")
        else:
            offset = self.tiles.block(machine, 0, k, down_first=True, by_warp="rows")
        return machine.load(self.tiles.memory, offset, 4, is_transposed=self.is_transposed)


def add_product(
    machine: Machine, totals: Sequence[Registers], a: InRegisters | InMemory, b: Tiles, depth: int, *, b_is_transposed: bool
) -> list[Registers]:
    """totals[64, X] + a[64, depth] @ b[depth, X], or @ b[X, depth].T: of each 8 columns a warp's four registers."""
    totals = list(totals)
    for k in range(0, depth, BLOCK):
        block = a.blocks[k // BLOCK] if isinstance(a, InRegisters) else a.block(machine, k)
        for place in range(0, len(totals), 2):
            x, num_products = place * TILE_ROWS, min(2, len(totals) - place)
            row, column = (x, k) if b_is_transposed else (k, x)
            offset = b.block(machine, row, column, down_first=not b_is_transposed)
            columns = machine.load(b.memory, offset, 2 * num_products, is_transposed=not b_is_transposed)
            for i in range(num_products):
                totals[place + i] = machine.multiply(totals[place + i], block, columns[2 * i : 2 * i + 2])
    return totals
