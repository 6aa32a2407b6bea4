"""PrefillRole: prefill with its scheduler, pages and worker. What it has prefilled leaves it as a `HandOff`."""

from __future__ import annotations

import math
from bisect import insort
from typing import Any

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_transfer.cross_mesh import PrefixRecall
from jaxinfer.kv_transfer.handoff import HandOff, HandOffState
from jaxinfer.kv_transfer.page_moves import HostPageMover
from jaxinfer.kv_transfer.tiers import TierTransfer
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.scheduler import Chunk, Preempt, PreemptForAdmission, PrefillScheduler
from jaxinfer.prefill.worker import Prefilled, PrefillWorker
from jaxinfer.sequence import Sequence, SequenceState


class PrefillRole:
    """Owns a sequence from `add` until its hand-off is over. `chunk_size`: tokens a step, where nothing steers it.
    `tiers`: where pages may be that the mesh has no more; `recall`: how to get pages that a decode role has; `mover`:
    pages out of this role's pool and into it."""

    def __init__(
        self,
        manager: KVManager,
        scheduler: PrefillScheduler,
        worker: PrefillWorker,
        chunk_size: int,
        tiers: TierTransfer | None = None,
        recall: PrefixRecall | None = None,
        mover: HostPageMover | None = None,
    ) -> None:
        self.manager, self.scheduler, self.worker = manager, scheduler, worker
        self._chunk_size = chunk_size
        self.tiers, self.recall, self.mover = tiers, recall, mover
        scheduler.tiers = tiers
        scheduler.recall = None if recall is None else recall.fill
        self.prefilled: list[Sequence] = []  # wait for a decode role, in scheduling order
        self._handoffs: dict[Sequence, HandOff] = {}  # that are not over

    @property
    def chunk_controller(self) -> ChunkSizeController:
        return self.worker.chunk_controller

    @property
    def num_in_flight(self) -> int:
        """Steps in flight."""
        return self.worker.num_in_flight

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages yet."""
        return self.scheduler.num_waiting

    @property
    def num_admitted(self) -> int:
        """Sequences that hold pages."""
        return len(self.scheduler.prefilling) + len(self.prefilled)

    @property
    def has_prompts(self) -> bool:
        """Whether any sequence waits or is being prefilled."""
        return bool(self.scheduler.prefilling) or self.scheduler.has_waiting

    def add_bucket(self, size: int, programs: dict[str, Any]) -> None:
        """Steps of so many tokens may be taken from now on, with these programs."""
        self.worker.runner.add_bucket(size, programs)
        self.scheduler.buckets = self.worker.runner.buckets

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, or one that was preempted."""
        self.scheduler.add(sequence)

    def poll_tiers(self, timeout: float = 0.0) -> None:
        """Advance transfers between the tiers and the mesh; wait up to `timeout` seconds for the first."""
        if self.has_prompts:
            self.scheduler.poll_tiers(timeout)
        elif self.tiers is not None:
            self.tiers.poll(0.0)

    def budget(self, num_decoding: int, decode_step_seconds: float, now: float) -> int:
        """Tokens of the next step while `num_decoding` sequences decode, or wait for it."""
        controller = self.chunk_controller
        if not controller.steers:
            return self._chunk_size
        controller.observe_decode(decode_step_seconds)
        backlog = [(num_tokens, now - arrival_time) for num_tokens, arrival_time in self.scheduler.backlog()]
        return controller.budget(num_decoding, backlog)

    def launch(
        self, budget: int, num_free_slots: int, reserved_pages: int, preempt_for_admission: PreemptForAdmission, preempt: Preempt
    ) -> list[Chunk]:
        """Start the next step; returns its chunks. See `PrefillScheduler.schedule`."""
        return self.worker.launch(budget, num_free_slots, reserved_pages, preempt_for_admission, preempt)

    def collect(self, *, wait: int = 0, until: float = math.inf) -> list[Prefilled]:
        """Prompts whose steps have ended, each with its first token, which the caller appends."""
        return self.worker.collect(wait=wait, until=until)

    def keep(self, sequence: Sequence) -> None:
        """Queue a sequence with its first token for a decode role."""
        insort(self.prefilled, sequence, key=lambda s: s.scheduling_order)

    def offer(self, sequence: Sequence) -> HandOff:
        """The hand-off of an admitted sequence in its current state. While prefill goes on it is offered again for
        every chunk, as the same object."""
        progress, is_known = sequence.prefill, sequence.state is SequenceState.PREFILLED
        handoff = self._handoffs.get(sequence)
        if handoff is None:
            num_tokens = len(sequence.token_ids) - is_known
            handoff = self._handoffs[sequence] = HandOff(sequence, self.manager.spec, [], num_tokens, 0)
        handoff.pages = list(progress.pages)
        handoff.num_ready = progress.num_computed
        return handoff

    def handoff(self, sequence: Sequence) -> HandOff | None:
        """A sequence's hand-off in progress; None if it was not offered."""
        return self._handoffs.get(sequence)

    def close(self, handoff: HandOff) -> None:
        """A hand-off is over. Complete: the sequence is another role's. Cancelled: it may be offered anew."""
        assert handoff.is_over, handoff.state
        sequence = handoff.sequence
        del self._handoffs[sequence]
        if handoff.state is HandOffState.COMPLETE:
            self.prefilled.remove(sequence)
            self.manager.free(sequence.prefill.pages)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands, and give its pages back. Its hand-off is cancelled."""
        if (handoff := self._handoffs.pop(sequence, None)) is not None:
            handoff.cancel()
        if sequence in self.prefilled:
            self.prefilled.remove(sequence)
        self.scheduler.remove(sequence)
