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
    """Every running sequence decodes at every step; sequences join and leave between any two."""

    def __init__(self, manager: KVManager, num_slots: int) -> None:
        self._manager = manager
        self.grown: list[int] = []  # of the sequences scheduled last, the places of those that got a new page
        self._free_slots = list(range(num_slots))
        self.running: list[Sequence] = []  # in turn

    def join(self, sequence: Sequence) -> None:
        """Give a handed-over sequence a slot."""
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda s: s.turn)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's slot and pages back. A step under way may still write to them, before any new owner does."""
        self.running.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        # The newest token's key and value are not written yet, or only by a step whose result nobody reads.
        self._manager.keep(sequence.decode_pages, sequence.token_ids, len(sequence.token_ids) - 1, sequence.context)
        self._manager.free(sequence.decode_pages)

    def schedule(self, preempt: Preempt) -> list[Sequence]:
        """The next step's sequences, each with a page for the token it feeds. The most urgent first, so that they are served before pages run out."""
        scheduled: list[Sequence] = []
        self.grown = []
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING or not sequence.can_decode_more():
                continue
            if len(sequence.token_ids) + sequence.num_in_flight > self._manager.num_tokens(sequence.decode_pages):
                if not self._find_page(sequence, preempt):
                    continue
                self.grown.append(len(scheduled))
            scheduled.append(sequence)
        return scheduled

    def _find_page(self, sequence: Sequence, preempt: Preempt) -> bool:
        num_tokens = len(sequence.token_ids) + sequence.num_in_flight
        self._manager.slide(sequence.decode_pages, num_tokens - 1)
        while not self._manager.grow(sequence.decode_pages, num_tokens, filled=num_tokens - 1):
            victim = preempt()
            assert victim is not None, "a running sequence holds pages"
            if victim is sequence:
                return False
        return True
