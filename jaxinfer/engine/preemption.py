"""Preemption: which sequence loses its pages or slot when they run out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxinfer.decode.role import DecodeRole
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.sequence import Sequence, SequenceState
from jaxinfer.stats import EngineStats


class Preemption:
    """The last in scheduling order of those that hold what is short is preempted: its pages are freed, and it is
    queued to be computed again. Its tokens are kept, and those of its pages that nobody needs meanwhile.

    `shares_pages`: whether both roles have one pool. `max_batch_size`: sequences that may hold pages at once."""

    def __init__(self, prefill: PrefillRole, decode: DecodeRole, shares_pages: bool, max_batch_size: int, stats: EngineStats) -> None:
        self._prefill, self._decode = prefill, decode
        self._shares_pages, self._max_batch_size = shares_pages, max_batch_size
        self._stats = stats

    def for_admission(self, waiting: Sequence, prefilling: list[Sequence]) -> bool:
        """Preempt a sequence less urgent than a waiting one, which needs its slot or pages."""
        holders = self._prefill.prefilled + prefilling
        # On two meshes a running sequence holds none of the pages that a prompt needs.
        num_admitted = self._prefill.num_admitted + len(self._decode.running)
        if self._shares_pages or num_admitted >= self._max_batch_size:
            holders += self._decode.running
        return self._preempt_above(self._prefill.scheduler.queue.level(waiting), holders)

    def for_progress(self, sequence: Sequence, prefilling: list[Sequence]) -> bool:
        """Preempt a sequence after an admitted one in scheduling order, which needs pages to continue."""
        holders = self._prefill.prefilled + prefilling + (self._decode.running if self._shares_pages else [])
        return self._preempt_after(sequence.scheduling_order, holders)

    def for_handoff(self, sequence: Sequence) -> bool:
        """Preempt a running sequence less urgent than a prefilled one, which needs its slot or pages."""
        return self._preempt_above(sequence.scheduling_order[0], self._decode.running)

    def for_decode(self) -> Sequence | None:
        """Preempt the last in scheduling order of those with pages of decode's pool; returns it, or None."""
        holders = list(self._decode.running)
        if self._shares_pages:
            holders += self._prefill.prefilled + self._prefill.scheduler.prefilling
        if not holders:
            return None
        victim = max(holders, key=lambda s: s.scheduling_order)
        self._preempt(victim)
        return victim

    def release(self, sequence: Sequence) -> None:
        """Release everything that a sequence holds in either role."""
        if sequence.state is SequenceState.RUNNING:
            self._decode.leave(sequence)
        elif (handoff := self._prefill.handoff(sequence)) is not None:
            self._decode.cancel(handoff)
        self._prefill.remove(sequence)

    def pause(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Take all sequences from both roles, and wait for the steps under way, whose results are dropped; returns the
        sequences in the order of their arrival. One that is to go on is made waiting, and added to prefill."""
        paused = sorted(sequences, key=lambda s: s.order)
        for sequence in paused:
            self.release(sequence)
            sequence.restart()
            sequence.state = SequenceState.PAUSED
        while self._prefill.num_in_flight:
            self._prefill.collect(wait=1)
        while self._decode.num_in_flight:
            self._decode.collect()
        return paused

    def _preempt_above(self, level: int, holders: list[Sequence]) -> bool:
        """Preempt the last of those less urgent than a level; False if there is none."""
        return self._preempt_after((level, math.inf), holders)

    def _preempt_after(self, order: tuple[int, float], holders: list[Sequence]) -> bool:
        victim = max(holders, key=lambda s: s.scheduling_order, default=None)
        if victim is None or victim.scheduling_order <= order:
            return False
        self._preempt(victim)
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.release(victim)
        victim.restart()
        self._prefill.add(victim)
        self._stats.num_preemptions += 1
