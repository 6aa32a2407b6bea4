"""Which sequences the next decode step extends, and who gives way when pages run out. Imports no JAX."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.sequence import Sequence, SequenceState

# Takes pages from the last in turn of the sequences that hold any of the pool and queues it for recomputing; returns it, None if there is none.
Preempt = Callable[[], Sequence | None]


class DecodeScheduler:
    """Every running sequence decodes at every step of its lane; sequences join and leave between any two. A lane is what one step takes: a
    pipeline has one for each stage, all else one of all sequences. The slots of each lane follow those of the one before."""

    def __init__(self, manager: KVManager, num_slots: int, num_lanes: int = 1) -> None:
        self._manager = manager
        self._num_slots = num_slots  # of a lane
        self.grown: list[int] = []  # of the sequences scheduled last, the places of those that got a new page
        self._free_slots = [list(range(lane * num_slots, (lane + 1) * num_slots)) for lane in range(num_lanes)]
        self.running: list[Sequence] = []  # in turn

    def lane(self, sequence: Sequence) -> int:
        """That a running sequence is in."""
        return sequence.slot // self._num_slots

    @property
    def num_active_lanes(self) -> int:
        """Lanes with any sequence."""
        return sum(len(slots) < self._num_slots for slots in self._free_slots)

    def join(self, sequence: Sequence) -> None:
        """Give a handed-over sequence a slot, in the lane that has the most left."""
        sequence.slot = heapq.heappop(max(self._free_slots, key=len))
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda s: s.turn)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's slot and pages back. A step under way may still write to them, before any new owner does."""
        self.running.remove(sequence)
        heapq.heappush(self._free_slots[self.lane(sequence)], sequence.slot)
        sequence.slot = -1
        # The newest token's key and value are not written yet, or only by a step whose result nobody reads.
        self._manager.insert(sequence.decode_pages, sequence.token_ids, len(sequence.token_ids) - 1, sequence.context)
        self._manager.free(sequence.decode_pages)

    def schedule(self, preempt: Preempt, lane: int = 0) -> list[Sequence]:
        """The sequences of a lane's next step, each with a page for the token it feeds. The most urgent first, so that they are served before pages run out."""
        scheduled: list[Sequence] = []
        self.grown = []
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING or self.lane(sequence) != lane or not sequence.can_decode_more():
                continue
            if sequence.needs_history and sequence.num_in_flight > 1:  # a pipeline's lone lane is a step further ahead
                continue
            if len(sequence.token_ids) + sequence.num_in_flight > self._manager.num_tokens(sequence.decode_pages):
                if not self._find_page(sequence, preempt):
                    continue
                self.grown.append(len(scheduled))
            scheduled.append(sequence)
        return scheduled

    def _find_page(self, sequence: Sequence, preempt: Preempt) -> bool:
        num_tokens = len(sequence.token_ids) + sequence.num_in_flight
        self._manager.release_outside_window(sequence.decode_pages, num_tokens - 1)
        while not self._manager.grow(sequence.decode_pages, num_tokens, filled=num_tokens - 1):
            victim = preempt()
            assert victim is not None, "a running sequence holds pages"
            if victim is sequence:
                return False
        return True
