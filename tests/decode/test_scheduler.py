from jaxinfer.decode.scheduler import DecodeScheduler
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.request import RequestContext
from jaxinfer.sequence import Sequence, SequenceState
from tests import sequences


def scheduler(num_pages: int, num_slots: int = 4) -> tuple[DecodeScheduler, KVManager]:
    manager = KVManager(PageSpec(1, 1, 1, 4, 4), num_pages + 1)
    return DecodeScheduler(manager, num_slots), manager


def joined(running: DecodeScheduler, manager: KVManager, length: int, **params: object) -> Sequence:
    sequence = sequences.make(length, **params)
    sequence.level = sequence.context.priority
    assert manager.grow(sequence.decode.pages, length)
    running.join(sequence)
    return sequence


def never() -> None:
    raise AssertionError("there are pages enough")


def test_all_that_run_are_scheduled_with_a_page_for_the_token_they_feed():
    running, manager = scheduler(10)
    first, second = joined(running, manager, 4), joined(running, manager, 5)
    first.token_ids.append(1)  # sampled by prefill, not in the cache yet
    assert running.schedule(never) == [first, second]
    assert (len(first.decode.pages), len(second.decode.pages)) == (2, 2)
    assert {first.decode.slot, second.decode.slot} == {0, 1}


def test_tokens_in_flight_count():
    running, manager = scheduler(10)
    sequence = joined(running, manager, 4, max_tokens=3)
    sequence.decode.num_in_flight = 1
    assert running.schedule(never) == [sequence]
    assert len(sequence.decode.pages) == 2, "the token in flight is fed next"
    sequence.token_ids += [1, 2]
    assert running.schedule(never) == [], "two tokens and one in flight are all it may have"


def test_the_least_urgent_is_preempted_before_the_youngest() -> None:
    running, manager = scheduler(10)
    batch, old, young = (joined(running, manager, 4, context=RequestContext(priority=p)) for p in (20, 0, 0))
    assert running.schedule(never) == [old, young, batch]


def test_the_youngest_is_preempted_when_pages_run_out():
    running, manager = scheduler(4)
    old, middle, young = (joined(running, manager, 4) for _ in range(3))
    for sequence in (old, middle, young):
        sequence.token_ids.append(1)
    preempted = []

    def preempt() -> Sequence:
        victim = max(running.running, key=lambda s: s.scheduling_order)
        running.leave(victim)
        victim.state = SequenceState.WAITING
        preempted.append(victim)
        return victim

    assert running.schedule(preempt) == [old, middle]
    assert preempted == [young]
    assert young.decode.pages == []
    assert young.decode.slot == -1
    assert manager.num_used == 4


def test_a_sequence_may_have_to_be_preempted_itself():
    running, manager = scheduler(1)
    alone = joined(running, manager, 4)
    alone.token_ids.append(1)

    def preempt() -> Sequence:
        running.leave(alone)
        alone.state = SequenceState.WAITING
        return alone

    assert running.schedule(preempt) == []
    assert manager.num_used == 0


def test_slots_are_used_again_lowest_first():
    running, manager = scheduler(10, num_slots=3)
    first, _, third = (joined(running, manager, 1) for _ in range(3))
    running.leave(third)
    running.leave(first)
    assert joined(running, manager, 1).decode.slot == 0
    assert joined(running, manager, 1).decode.slot == 2
