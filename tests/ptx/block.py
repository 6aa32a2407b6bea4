"""A block of threads: its warps by turns of any length, in any order, with shared memory, barriers and the copy engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.ptx.launch import Launch, TensorMap
from tests.ptx.memory import Memory
from tests.ptx.registers import GLOBAL, LANES, MAPS, kind_of

# An instruction: gives nothing, the place of the next one, -1 at the end, or what tells whether it need not wait.
Step = Callable[["Warp"], Any]


@dataclass
class Barrier:
    """An mbarrier."""

    expected: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.expected

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        self.bytes += expected_bytes
        self.pending -= count
        assert self.pending >= 0, "more arrive than a phase has"
        self._turn()

    def complete(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.expected, self.phase + 1


@dataclass
class Warp:
    block: Block
    index: int
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    products: list[list[Callable[[], None]]] = field(default_factory=lambda: [[]])  # that are still to be done; the last group is open

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
        self.named: dict[int, int] = {}  # threads that have come to a barrier of the block's
        self.passed: dict[int, int] = {}  # how often it let them through
        self.unfenced = np.full(launch.shared_memory, -1, np.int16)  # by which warp, since its last fence for the copy engine and products
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
        for copy in self.copies:
            copy()

    def written(self, warp: Warp, places: np.ndarray) -> None:
        """Bytes of shared memory were written by a warp's own instructions."""
        self.unfenced[places] = warp.index

    def fence(self, warp: Warp) -> None:
        """What a warp wrote may be read by the copy engine and by products."""
        self.unfenced[self.unfenced == warp.index] = -1

    def check_fenced(self, places: np.ndarray) -> None:
        """Before the copy engine or a product reads these bytes."""
        writers = np.unique(self.unfenced[places])
        if writers[-1] >= 0:
            raise RuntimeError(f"shared memory that warps {writers[writers >= 0].tolist()} wrote is read by another proxy without a fence")

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
