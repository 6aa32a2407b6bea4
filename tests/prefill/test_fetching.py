"""Sequences that wait for their pages from the tiers: they come and go without a trace, and hold up nobody."""

from __future__ import annotations

import pytest

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.prefill.scheduler import PrefillScheduler
from jaxinfer.sequence import Sequence, SequenceState
from tests import sequences

NO_ROOM = lambda waiting, prefilling: False  # noqa: E731


class ScriptedTiers:
    """Fetches for those that a test names, until it says that they have ended."""

    def __init__(self) -> None:
        self.wanted: set[Sequence] = set()
        self.wanted_again: set[Sequence] = set()
        self.ended: list[Sequence] = []
        self.forgotten: list[Sequence] = []
        self.num_filled: dict[Sequence, int] = {}  # tokens

    def begin(self, sequence: Sequence) -> bool:
        return sequence in self.wanted

    def begin_again(self, sequence: Sequence) -> bool:
        is_wanted = sequence in self.wanted_again
        self.wanted_again.discard(sequence)
        return is_wanted

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def poll(self, timeout: float) -> list[Sequence]:
        return self.ended

    def fill(self, sequence: Sequence, table: list[int], num_cached: int) -> int:
        return max(num_cached, self.num_filled.get(sequence, 0))


@pytest.fixture
def tiers() -> ScriptedTiers:
    return ScriptedTiers()


@pytest.fixture
def scheduler(tiers: ScriptedTiers) -> PrefillScheduler:
    made = PrefillScheduler(KVManager(PageSpec(1, 1, 1, 16, 4), 101), WaitingQueue(10.0, 512), (128,))
    made.tiers = tiers
    return made


def chunks(scheduler: PrefillScheduler, num_free_slots: int = 9) -> list[tuple[Sequence, int, int]]:
    return [(chunk.sequence, chunk.start, chunk.length) for chunk in scheduler.schedule(128, num_free_slots, 0, NO_ROOM)]


def test_who_waits_for_pages_is_overtaken_and_starts_behind_them(scheduler, tiers):
    first, second = sequences.make(100), sequences.make(20)
    tiers.wanted, tiers.num_filled = {first}, {first: 64}
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.waiting == [first, second]
    assert scheduler.num_waiting == 2
    assert chunks(scheduler) == [(second, 0, 20)]
    scheduler.poll_tiers(0.0)
    assert chunks(scheduler) == []
    tiers.ended = [first]
    scheduler.poll_tiers(0.0)
    assert chunks(scheduler) == [(first, 64, 36)]
    assert first.prefill.num_cached == 64
    scheduler.poll_tiers(0.0)  # which may still tell of it
    assert scheduler.num_waiting == 0


def test_what_came_up_is_there_for_others_at_once(scheduler, tiers):
    first, second = sequences.make(100), sequences.make(90)
    tiers.num_filled = {first: 96}
    scheduler.add(first)
    scheduler.add(second)
    assert chunks(scheduler) == [(first, 96, 4), (second, 80, 10)]
    assert first.prefill.pages[:5] == second.prefill.pages[:5]


@pytest.mark.parametrize("has_ended", [False, True])
def test_who_goes_away_meanwhile_is_forgotten(scheduler, tiers, has_ended):
    sequence = sequences.make(100)
    tiers.wanted = {sequence}
    scheduler.add(sequence)
    if has_ended:
        tiers.ended = [sequence]
        scheduler.poll_tiers(0.0)
    scheduler.remove(sequence)
    assert tiers.forgotten == [sequence]
    assert scheduler.waiting == []
    tiers.ended = [sequence]
    scheduler.poll_tiers(0.0)
    assert chunks(scheduler) == []


def test_siblings_wait_for_the_first_and_then_start_from_its_prompt_though_tiers_have_pages_of_it(scheduler, tiers):
    first = sequences.make(40)
    sibling = sequences.make(40, leader=first)
    tiers.wanted = {first, sibling}
    scheduler.add(first)
    scheduler.add(sibling)
    assert scheduler.waiting == [first, sibling]
    assert chunks(scheduler) == []
    tiers.ended, tiers.num_filled = [first], {first: 32}
    scheduler.poll_tiers(0.0)
    assert chunks(scheduler) == [(first, 32, 8)]
    scheduler.done(first, lambda: None)
    assert chunks(scheduler) == [(sibling, 40, 0)]


def test_who_must_fetch_again_takes_no_place_and_holds_up_nobody(scheduler, tiers):
    first, second = sequences.make(100), sequences.make(20)
    tiers.wanted_again = {first}
    scheduler.add(first)
    scheduler.add(second)
    assert chunks(scheduler, num_free_slots=1) == [(second, 0, 20)]
    assert first.state is SequenceState.WAITING
    assert first.prefill.pages == []
    assert scheduler.waiting == [first]
    tiers.ended = [first]
    scheduler.poll_tiers(0.0)
    assert chunks(scheduler) == [(first, 0, 100)]


def test_who_is_preempted_may_fetch_its_pages(scheduler, tiers):
    sequence = sequences.make(100)
    scheduler.add(sequence)
    chunks(scheduler)
    scheduler.remove(sequence)
    sequence.state, sequence.prefill.num_computed = SequenceState.WAITING, 0
    tiers.wanted = {sequence}
    scheduler.add(sequence)
    assert chunks(scheduler) == []
    tiers.ended = [sequence]
    scheduler.poll_tiers(0.0)
    assert chunks(scheduler) == [(sequence, 96, 4)], "its own pages were kept"
