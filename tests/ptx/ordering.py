"""Which accesses to a block's shared memory are ordered, whatever the order that they happen to run in: vector clocks, as race detectors have them
(FastTrack, Flanagan and Freund 2009), with PTX's proxies.

An agent is what runs by itself: a warp; a warp's products (wgmma), which read shared memory until they are waited for; a warp's copies to global memory,
which read it until `cp.async.bulk.wait_group`; each mbarrier, for the copies that it counts, which write until its phase is complete. An agent's
epoch counts its releases, products, groups of copies or copies. Each warp knows up to which epoch of each other agent everything has happened before its next
instruction, and up to which epoch that has passed a proxy fence since. Threads of a warp are one: they run in lockstep here.
"""

from __future__ import annotations

import numpy as np

# Rows of a warp's clock: what has happened before, which of it the async proxy sees, and which mbarriers it sees initialised.
_SEEN, _FENCED, _MADE = range(3)
_AGENTS = 160  # most of a block; the last one is nobody
_ALWAYS = np.iinfo(np.int32).max


class RaceError(RuntimeError):
    """Two accesses of which neither is known to happen before the other, or one that a fence is missing before."""


class Order:
    """Of a block. Places are bytes of its shared memory."""

    def __init__(self, num_warps: int, num_bytes: int) -> None:
        self.num_warps = num_warps
        self.clocks = np.zeros((num_warps, 3, _AGENTS), np.int32)
        self.clocks[range(num_warps), _SEEN, range(num_warps)] = 1
        self.clocks[:, _FENCED, num_warps:] = _ALWAYS  # the async proxy sees what it did itself
        self.writers = np.full(num_bytes, -1, np.int16)
        self.written = np.zeros(num_bytes, np.int32)
        self.read = np.zeros((3 * num_warps, num_bytes), np.int32)
        self.barriers: dict[int, int] = {}
        self.products = np.zeros(num_warps, np.int32)  # started
        self.groups = np.ones(num_warps, np.int32)  # of copies to global memory: the open one
        self.copied = np.zeros(num_warps, np.int32)  # the last of them with a copy

    # What warps do themselves.

    def reads(self, warp: int, places: np.ndarray) -> None:
        self._after_writes(warp, places, "is read")
        self.read[warp, places] = self.clocks[warp, _SEEN, warp]

    def writes(self, warp: int, places: np.ndarray) -> None:
        self._after_writes(warp, places, "is written")
        self._after_reads(warp, places)
        self.writers[places], self.written[places] = warp, self.clocks[warp, _SEEN, warp]

    def release(self, warp: int) -> np.ndarray:
        """What others see that wait for it."""
        clock = self.clocks[warp].copy()
        self.clocks[warp, _SEEN, warp] += 1
        return clock

    def acquire(self, warp: int, clock: np.ndarray) -> None:
        np.maximum(self.clocks[warp], clock, out=self.clocks[warp])

    def nothing(self) -> np.ndarray:
        """A clock to collect releases in."""
        return np.zeros((3, _AGENTS), np.int32)

    def fence_async(self, warp: int) -> None:
        """fence.proxy.async"""
        self._fence(warp, _FENCED)
        self._fence(warp, _MADE)
        self.clocks[warp, _SEEN, warp] += 1

    def fence_barriers(self, warp: int) -> None:
        """fence.mbarrier_init"""
        self._fence(warp, _MADE)
        self.clocks[warp, _SEEN, warp] += 1

    def _fence(self, warp: int, row: int) -> None:
        np.maximum(self.clocks[warp, row], self.clocks[warp, _SEEN], out=self.clocks[warp, row])

    # What runs by itself.

    def product_begins(self, warp: int) -> int:
        """Gives the product's number."""
        self.products[warp] += 1
        return int(self.products[warp])

    def product_reads(self, warp: int, number: int, places: np.ndarray) -> None:
        self._seen_by_async(warp, places)
        self.read[self.num_warps + warp, places] = number

    def product_is_done(self, warp: int, number: int) -> None:
        self.clocks[warp, _SEEN, self.num_warps + warp] = number

    def copy_reads(self, warp: int, places: np.ndarray) -> None:
        """A copy to global memory, of the open group."""
        self._seen_by_async(warp, places)
        self.read[2 * self.num_warps + warp, places] = self.copied[warp] = self.groups[warp]

    def copies_are_done(self, warp: int, num_left: int) -> None:
        """But for those of so many groups, and of the open one, shared memory was read."""
        self.clocks[warp, _SEEN, 2 * self.num_warps + warp] = self.groups[warp] - 1 - num_left

    def copy_writes(self, warp: int, places: np.ndarray, barrier: int, number: int) -> None:
        """A copy from global memory, on its way until the barrier there has counted so many."""
        self._seen_by_async(warp, places)
        self._after_reads(warp, places)
        self.writers[places], self.written[places] = self._agent(barrier), number

    def copies_are_there(self, warp: int, barrier: int, number: int) -> None:
        """So many of the barrier's copies, to a warp that has waited for it."""
        clock = self.clocks[warp, _SEEN]
        agent = self._agent(barrier)
        clock[agent] = max(clock[agent], number)

    def made_by(self, warp: int) -> tuple[int, int]:
        """Stamp of an mbarrier's initialisation."""
        return warp, int(self.clocks[warp, _SEEN, warp])

    def check_made(self, warp: int, made: tuple[int, int], *, is_async: bool) -> None:
        maker, epoch = made
        if epoch > self.clocks[warp, _SEEN, maker]:
            raise RaceError(f"warp {warp} uses a barrier that warp {maker} may not have initialised yet")
        if is_async and epoch > self.clocks[warp, _MADE, maker]:
            raise RaceError(f"the copy engine uses a barrier that warp {maker} initialised without a fence")

    def check_end(self) -> None:
        """At the block's end, when its shared memory is another's."""
        done = self.clocks[range(self.num_warps), _SEEN, range(2 * self.num_warps, 3 * self.num_warps)]
        late = np.flatnonzero(self.copied > done).tolist()
        if late:
            raise RaceError(f"the block ends while copies of warps {late} may still read its shared memory")

    def _agent(self, barrier: int) -> int:
        agent = self.barriers.setdefault(barrier, 3 * self.num_warps + len(self.barriers))
        assert agent < _AGENTS - 1, "too many barriers"
        return agent

    def _after_writes(self, warp: int, places: np.ndarray, what: str) -> None:
        is_late = self.written[places] > self.clocks[warp, _SEEN][self.writers[places]]
        if is_late.any():
            writers = np.unique(self.writers[places][is_late]).tolist()
            raise RaceError(f"shared memory {what} by warp {warp} while {self._names(writers)} may still write it")

    def _after_reads(self, warp: int, places: np.ndarray) -> None:
        is_late = self.read[:, places].reshape(len(self.read), -1).max(axis=1) > self.clocks[warp, _SEEN, : len(self.read)]
        if is_late.any():
            raise RaceError(
                f"shared memory is written by warp {warp} while {self._names(np.flatnonzero(is_late).tolist())} may still read it"
            )

    def _seen_by_async(self, warp: int, places: np.ndarray) -> None:
        self._after_writes(warp, places, "is read or written by the copy engine or a product")
        is_late = self.written[places] > self.clocks[warp, _FENCED][self.writers[places]]
        if is_late.any():
            writers = np.unique(self.writers[places][is_late]).tolist()
            raise RaceError(f"shared memory that warps {writers} wrote is read by another proxy without a fence")

    def _names(self, agents: list[int]) -> str:
        kinds = ("warps", "products of warps", "copies of warps", "the copies of barriers")
        by_kind: dict[int, list[int]] = {}
        for agent in agents:
            kind = min(agent // self.num_warps, 3)
            by_kind.setdefault(kind, []).append(agent - kind * self.num_warps)
        return " and ".join(f"{kinds[kind]} {places}" for kind, places in sorted(by_kind.items()))
