"""A block of threads: its warps by turns of any length, in any order, with shared memory, barriers and the copy engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.ptx.launch import Launch, TensorMap
from tests.ptx.memory import Memory
from tests.ptx.ordering import Order, RaceError
from tests.ptx.registers import GLOBAL, LANES, MAPS, kind_of

# An instruction: gives nothing, the place of the next one, -1 at the end, or what tells whether it need not wait.
Step = Callable[["Warp"], Any]


@dataclass
class Barrier:
    """An mbarrier. Clocks are `Order`'s: what arrivals of this phase release, and what those who wait for the last one see."""

    expected: int
    address: int
    made: tuple[int, int]
    collected: np.ndarray
    released: np.ndarray
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    num_copies: int = 0  # that it was to count
    num_brought: int = 0  # of them, the first ones
    num_waited_for: int = 0  # that were there when its last phase ended

    def __post_init__(self) -> None:
        self.pending = self.expected

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        self.bytes += expected_bytes
        self.pending -= count
        if self.pending < 0:
            raise RaceError("more arrive at a barrier than a phase has")
        self._turn()

    def complete(self, size: int) -> None:
        self.bytes -= size
        self.num_brought += 1
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase, self.num_waited_for = self.expected, self.phase + 1, self.num_brought
            np.maximum(self.released, self.collected, out=self.released)


@dataclass
class NamedBarrier:
    """One use of a barrier of the block's."""

    clock: np.ndarray
    num_threads: int = 0
    is_over: bool = False


@dataclass
class Products:
    """A group of products that run by themselves: those still to be done, the last one's number, and the registers that they use."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    last: int = 0
    sums: set[str] = field(default_factory=set)
    factors: set[str] = field(default_factory=set)


@dataclass
class Warp:
    block: Block
    index: int
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    products: list[Products] = field(default_factory=lambda: [Products()])  # until they are waited for; the last group is open
    touched: set[str] = field(default_factory=set)  # registers that were read or written since the last wgmma.fence
    sums: set[str] = field(default_factory=set)  # registers of all groups
    factors: set[str] = field(default_factory=set)

    def check_registers(self, read: frozenset[str], written: frozenset[str]) -> None:
        """Before an instruction other than a product that reads and writes these."""
        if self.sums and not (self.sums.isdisjoint(read) and self.sums.isdisjoint(written)):
            raise RaceError(
                f"warp {self.index} uses registers {sorted(self.sums & (read | written))[:4]} while a product may still add to them"
            )
        if self.factors and not self.factors.isdisjoint(written):
            raise RaceError(f"warp {self.index} writes registers {sorted(self.factors & written)[:4]} while a product may still read them")
        self.touched |= read
        self.touched |= written

    def get(self, name: str) -> np.ndarray:
        """What was never written is anything: as a number, NaN."""
        found = self.registers.get(name)
        return np.full(LANES, -1).astype(kind_of(name)) if found is None else found


class Block:
    def __init__(
        self, launch: Launch, steps: Sequence[Step], memory: Memory, place: tuple[int, int, int], seed: int = 0, max_steps: int = 200
    ) -> None:
        self.launch, self.steps, self.memory, self.place, self.max_steps = launch, steps, memory, place, max_steps
        self.shared = np.full(launch.shared_memory, 0xFF, np.uint8)  # NaN in every type
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, NamedBarrier] = {}  # that threads have come to
        self.order = Order(launch.num_threads // LANES, launch.shared_memory)
        self.random = np.random.default_rng((*place, seed) if seed else place)
        self.copies: list[Callable[[], None]] = []
        self.alive: set[int] = set()
        self.maps: dict[int, TensorMap] = {}
        for parameter in launch.parameters:
            if isinstance(parameter, tuple):
                self.maps = {MAPS + 128 * i: each for i, each in enumerate(parameter)}

    def rounds(self) -> Iterator[bool]:
        """Lets every warp go on for a while, again and again; gives each time whether any could."""
        warps = [Warp(self, i) for i in range(self.launch.num_threads // LANES)]
        running = [self._steps(warp) for warp in warps]
        waits: list[Callable[[], bool] | None] = [None] * len(warps)
        self.alive = set(range(len(warps)))
        while self.alive:
            has_moved = False
            for i in self.random.permutation(sorted(self.alive)).tolist():
                wait = waits[i]
                if wait is not None and not wait():
                    continue
                has_moved = True
                try:
                    waits[i] = next(running[i])
                except StopIteration:
                    self.alive.remove(i)
            if not has_moved and self.copies:
                self.copies.pop(0)()
                has_moved = True
            yield has_moved
        self._check_end(warps)

    def _check_end(self, warps: Sequence[Warp]) -> None:
        """Shared memory and registers are another block's after it."""
        if self.copies:
            raise RaceError("the block ends while copies to its shared memory are on their way")
        for warp in warps:
            if warp.sums:
                raise RaceError(f"warp {warp.index} ends while its products may still run")
        self.order.check_end()

    def _steps(self, warp: Warp) -> Iterator[Callable[[], bool]]:
        steps, place, left = self.steps, 0, 0
        while place < len(steps):
            if not left:
                left = int(self.random.integers(1, self.max_steps))
                yield lambda: True
            left -= 1
            found = steps[place](warp)
            if found is None:
                place += 1
            elif callable(found):
                place += 1
                if not found():
                    yield found
            elif found < 0:
                return
            else:
                place = found

    def bytes_at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory that addresses lie in, and the places of their bytes, [..., size]."""
        addresses = addresses.astype(np.int64)
        assert not (addresses % size).any(), "aligned"
        if addresses.size and addresses.max() >= GLOBAL // 2:  # what lies before all arrays is meant for them too
            return self.memory.data, self.memory.at(addresses - GLOBAL, size)[..., None] + np.arange(size)
        return self.shared, addresses[..., None] + np.arange(size)
