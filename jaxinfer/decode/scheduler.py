"""Which sequences the next decode step extends, and who is preempted when pages run out. Imports no JAX."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.sequence import Sequence, SequenceState

# Preempts the last in scheduling order of the sequences that hold pages of the pool, and queues it for recomputing.
# Returns it, or None if there is none.
Preempt = Callable[[], Sequence | None]


class DecodeScheduler:
    """Continuous batching: every running sequence decodes in every step of its micro-batch; sequences join and leave
    between steps. A pipeline has one micro-batch a stage; without a pipeline there is one. Slots are numbered
    consecutively, micro-batch by micro-batch."""

    def __init__(self, manager: KVManager, num_slots: int, num_micro_batches: int = 1) -> None:
        self._manager = manager
        self._num_slots = num_slots  # of a micro-batch
        self.grown: list[int] = []  # among the sequences scheduled last, indices of those that got a new page
        self._free_slots = [list(range(micro_batch * num_slots, (micro_batch + 1) * num_slots)) for micro_batch in range(num_micro_batches)]
        self.running: list[Sequence] = []  # in scheduling order

    def micro_batch(self, sequence: Sequence) -> int:
        """The micro-batch of a running sequence."""
        return sequence.decode.slot // self._num_slots

    @property
    def num_active_micro_batches(self) -> int:
        """Micro-batches with any sequence."""
        return sum(len(slots) < self._num_slots for slots in self._free_slots)

    def join(self, sequence: Sequence) -> None:
        """Assign a slot to a handed-over sequence, in the micro-batch with the most free slots."""
        sequence.decode.slot = heapq.heappop(max(self._free_slots, key=len))
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda s: s.scheduling_order)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's slot and pages back. A step under way may still write to them, before any new owner
        does."""
        self.running.remove(sequence)
        heapq.heappush(self._free_slots[self.micro_batch(sequence)], sequence.decode.slot)
        sequence.decode.slot = -1
        # The newest token's key and value are not written yet, or only by a step whose result nobody reads.
        self._manager.insert(sequence.decode.pages, sequence, len(sequence.token_ids) - 1)
        self._manager.free(sequence.decode.pages)

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Forget a running sequence's last tokens, and give back the pages that only they had. A step under way may
        still write to them, before any new owner does."""
        sequence.roll_back(num_tokens)
        self._manager.truncate(sequence.decode.pages, len(sequence.token_ids))

    def schedule(self, preempt: Preempt, micro_batch: int = 0) -> list[Sequence]:
        """The sequences of a micro-batch's next step, each with a page for the token it feeds. The most urgent come
        first, so that they are served before pages run out."""
        scheduled: list[Sequence] = []
        self.grown = []
        for sequence in list(self.running):
            decode = sequence.decode
            if sequence.state is not SequenceState.RUNNING or decode.slot // self._num_slots != micro_batch:
                continue
            num_tokens = len(sequence.token_ids) + decode.num_in_flight  # once those in flight are read
            if num_tokens >= sequence.max_total_tokens:
                continue
            if sequence.needs_history and decode.num_in_flight > 1:  # a pipeline's lone micro-batch is one step further
                continue
            if num_tokens > self._manager.num_tokens(decode.pages):
                if not self._find_page(sequence, preempt):
                    continue
                self.grown.append(len(scheduled))
            scheduled.append(sequence)
        return scheduled

    def _find_page(self, sequence: Sequence, preempt: Preempt) -> bool:
        num_tokens = len(sequence.token_ids) + sequence.decode.num_in_flight
        self._manager.release_outside_window(sequence.decode.pages, num_tokens - 1)
        while not self._manager.grow(sequence.decode.pages, num_tokens, filled=num_tokens - 1):
            victim = preempt()
            assert victim is not None, "a running sequence holds pages"
            if victim is sequence:
                return False
        return True
