import numpy as np
import pytest

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.prefill.scheduler import FORK_TOKENS, Chunk, Fork, PreemptForAdmission, PrefillScheduler
from jaxinfer.programs.buckets import QUERY_TILE, prefill_rows, query_tile
from jaxinfer.request import RequestContext
from jaxinfer.sequence import Sequence, SequenceState
from tests import sequences

NO_ROOM = lambda waiting, prefilling: False  # noqa: E731
LAST_HIDDEN = object()


class Scheduler(PrefillScheduler):
    """With the arguments that most tests give."""

    chunk_size = 128

    def next(self, num_free_slots: int = 9, reserved_pages: int = 0, preempt_for_admission: PreemptForAdmission = NO_ROOM) -> list[Chunk]:
        chunks = self.schedule(self.chunk_size, num_free_slots, reserved_pages, preempt_for_admission)
        self.launched([chunk for chunk in chunks if not isinstance(chunk, Fork)])
        return chunks


def scheduler(num_pages: int = 1000, chunk_size: int = 128, buckets: tuple[int, ...] = (32, 128), prefix_cache: bool = False) -> Scheduler:
    manager = KVManager(PageSpec(1, 1, 1, 16, 4), num_pages + 1, prefix_cache=prefix_cache)
    made = Scheduler(manager, WaitingQueue(10.0, 512), buckets)
    made.chunk_size = chunk_size
    return made


def shape(chunks: list[Chunk]) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.length, chunk.is_last) for chunk in chunks]


def test_first_come_first_served_within_the_budget_of_whole_tiles():
    queue = scheduler()
    for length in (40, 10, 50, 5):
        queue.add(sequences.make(length))
    # 40 tokens use up two tiles, 10 one, and one tile is left for part of 50.
    assert shape(queue.next()) == [(0, 40, True), (0, 10, True), (0, 32, False)]
    assert shape(queue.next()) == [(32, 18, True), (0, 5, True)]
    assert queue.next() == []


def test_long_prompts_go_in_chunks():
    queue = scheduler()
    queue.add(sequences.make(300))
    assert [shape(queue.next()) for _ in range(4)] == [[(0, 128, False)], [(128, 128, False)], [(256, 44, True)], []]


def test_admission_stops_at_slots_rows_and_pages():
    queue = scheduler(chunk_size=512, buckets=(512,))
    for _ in range(12):
        queue.add(sequences.make(3))
    assert len(queue.next(2)) == 2
    assert len(queue.next(99)) == prefill_rows(512) == 8
    few = scheduler(num_pages=5)
    for length in (33, 1, 1):
        few.add(sequences.make(length))
    assert len(few.next(reserved_pages=2)) == 1, "3 pages of 5, and 2 are to stay free"
    assert len(few.next(reserved_pages=1)) == 1
    assert len(few.waiting) == 1


def test_none_overtakes_the_oldest_that_waits():
    queue = scheduler(num_pages=4)
    queue.add(sequences.make(100))
    queue.add(sequences.make(1))
    assert queue.next() == []


def test_a_sequence_gets_pages_for_its_whole_prompt_and_gives_them_back():
    queue, sequence = scheduler(num_pages=20), sequences.make(300)
    queue.add(sequence)
    queue.next()
    assert len(sequence.prefill.pages) == 19
    assert sequence.state is SequenceState.PREFILLING
    queue.remove(sequence)
    assert sequence.prefill.pages == []
    assert queue.prefilling == []
    other = sequences.make(320)
    queue.add(other)
    assert shape(queue.next()) == [(0, 128, False)]


def test_a_preempted_sequence_goes_before_those_that_came_later():
    queue, old, middle, young = scheduler(), *(sequences.make(1) for _ in range(3))
    queue.add(old)
    queue.add(young)
    queue.add(middle)
    assert queue.waiting == [old, middle, young]


def test_a_chunk_of_an_earlier_epoch_is_not_current():
    queue, sequence = scheduler(), sequences.make(10)
    queue.add(sequence)
    [chunk] = queue.next()
    assert chunk.is_current
    queue.remove(sequence)
    sequence.state, sequence.epoch, sequence.prefill.num_computed = SequenceState.WAITING, 1, 0
    assert not chunk.is_current
    queue.add(sequence)
    [again] = queue.next()
    assert again.is_current
    assert not chunk.is_current


def test_a_prompt_under_way_is_found_by_the_next_step():
    queue = scheduler(prefix_cache=True)
    for _ in range(2):
        queue.add(sequences.make(41))
    chunks = queue.schedule(64, 9, 0, NO_ROOM)
    assert shape(chunks) == [(0, 41, True)]
    queue.launched(chunks)
    assert shape(queue.next()) == [(32, 9, True)], "the first was started, and is not read yet"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_siblings_wait_for_the_first_and_start_from_its_prompt_and_nobody_waits_for_them(prefix_cache):
    queue, first = scheduler(prefix_cache=prefix_cache), sequences.make(40, n=3)
    siblings = [sequences.make(40, leader=first, n=3) for _ in range(2)]
    other, copied = sequences.make(10), []
    queue.copy_pages = lambda source, target: copied.append((source, target))
    for sequence in (first, *siblings, other):
        queue.add(sequence)
    assert queue.num_waiting == 4
    assert [chunk.sequence for chunk in queue.next()] == [first, other]
    assert queue.next() == []
    queue.done(first, lambda: LAST_HIDDEN)
    assert queue.next() == [Fork(sibling, 40, 0, True, 0, LAST_HIDDEN) for sibling in siblings], "they compute nothing"
    assert queue.num_waiting == 0
    assert [sibling.prefill.num_cached for sibling in siblings] == [0, 0], "computed for the request, once"
    assert {tuple(sequence.prefill.pages[:2]) for sequence in (first, *siblings)} == {tuple(first.prefill.pages[:2])}
    assert copied == [([first.prefill.pages[2]], [sibling.prefill.pages[2]]) for sibling in siblings]
    assert len({sequence.prefill.pages[2] for sequence in (first, *siblings)}) == 3


def test_a_step_takes_a_bounded_number_of_siblings_beside_other_prompts():
    queue, first = scheduler(), sequences.make(32, n=99)
    siblings = [sequences.make(32, leader=first, n=99) for _ in range(98)]
    for sequence in (first, *siblings, late := sequences.make(100)):
        queue.add(sequence)
    queue.next(99)
    queue.done(first, lambda: LAST_HIDDEN)
    per_step = queue.chunk_size // FORK_TOKENS
    forks = [len([chunk for chunk in queue.next(99) if isinstance(chunk, Fork)]) for _ in range(8)]
    assert forks == [*[per_step] * (98 // per_step), 98 % per_step, 0]
    assert late in queue.prefilling


def test_a_shared_prompt_makes_room_for_others_and_its_siblings_then_compute_it():
    """The leader is gone, the prompt takes 3 pages of 4, and an urgent prompt needs 2."""
    queue, first = scheduler(num_pages=4), sequences.make(40, n=2)
    sibling = sequences.make(40, leader=first, n=2)
    for sequence in (first, sibling):
        queue.add(sequence)
    queue.next()
    queue.done(first, lambda: LAST_HIDDEN)
    queue.remove(first)
    first.state = SequenceState.FINISHED
    urgent = sequences.make(20, context=RequestContext(priority=-1))
    queue.add(urgent)
    assert [(chunk.sequence, chunk.length) for chunk in queue.next()] == [(urgent, 20)]
    queue.done(urgent, lambda: LAST_HIDDEN)
    queue.remove(urgent)
    assert [(chunk.sequence, chunk.length) for chunk in queue.next()] == [(sibling, 40)]
    queue.remove(sibling)
    assert queue._manager.num_used == 0


@pytest.mark.parametrize("ended", ["before it started", "after it started"])
def test_a_shared_prompt_is_given_back_with_the_last_sibling(ended):
    queue, first = scheduler(), sequences.make(40, n=2)
    sibling = sequences.make(40, leader=first, n=2)
    for sequence in (first, sibling):
        queue.add(sequence)
    queue.next()
    queue.done(first, lambda: LAST_HIDDEN)
    queue.remove(first)
    assert queue._manager.num_used == 3, "for the sibling"
    if ended == "after it started":
        queue.next()
    queue.remove(sibling)
    assert queue._manager.num_used == 0
    assert queue.num_waiting == 0


def test_siblings_go_with_their_first():
    queue, first = scheduler(), sequences.make(40, n=2)
    sibling = sequences.make(40, leader=first, n=2)
    for sequence in (first, sibling):
        queue.add(sequence)
    queue.remove(first)
    queue.remove(sibling)
    assert queue.num_waiting == 0
    assert queue.next() == []


def test_a_known_prefix_is_not_computed_again_but_for_its_last_token():
    queue, first, second, longer = scheduler(prefix_cache=True), *(sequences.make(length) for length in (64, 64, 100))
    queue.add(first)
    assert shape(queue.next()) == [(0, 64, True)]
    queue.done(first, lambda: LAST_HIDDEN)
    queue.remove(first)
    queue.add(second)
    queue.add(longer)
    assert shape(queue.next()) == [(48, 16, True), (64, 36, True)]
    assert (first.prefill.num_cached, second.prefill.num_cached, longer.prefill.num_cached) == (0, 48, 64)


def test_a_prompt_that_is_to_be_scored_is_computed_whole():
    queue, first, scored = scheduler(prefix_cache=True), sequences.make(64), sequences.make(64, prompt_logprobs=1)
    queue.add(first)
    queue.next()
    queue.done(first, lambda: LAST_HIDDEN)
    queue.add(scored)
    assert shape(queue.next()) == [(0, 64, True)]


def test_what_a_preempted_sequence_had_computed_is_found_again():
    queue, sequence = scheduler(prefix_cache=True), sequences.make(300)
    queue.add(sequence)
    queue.next()
    queue.next()
    queue.remove(sequence)
    sequence.state, sequence.prefill.num_computed, sequence.epoch = SequenceState.WAITING, 0, 1
    queue.add(sequence)
    assert shape(queue.next()) == [(256, 44, True)]


def test_a_tenant_pays_for_each_token_once_whoever_preempts_it():
    queue, (ours, theirs) = scheduler(), (RequestContext(tenant=tenant) for tenant in ("ours", "theirs"))
    preempted, next_of_ours = (sequences.make(300, context=ours) for _ in range(2))
    others = [sequences.make(300, context=theirs) for _ in range(3)]
    for sequence in (preempted, *others, next_of_ours):
        queue.add(sequence)
    assert {chunk.sequence for chunk in queue.next(1)} == {preempted}
    for _ in range(5):  # 512 tokens are a turn, of which 300 are used
        queue.remove(preempted)
        preempted.state, preempted.prefill.num_computed = SequenceState.WAITING, 0
        queue.add(preempted)
        assert {chunk.sequence for chunk in queue.next(1)} == {preempted}
    assert queue.queue.head() is next_of_ours, "the turn is not over"


def test_urgent_work_goes_before_prompts_half_computed_and_work_that_waits():
    queue = scheduler()
    batch, late = (sequences.make(300, context=RequestContext(priority=20)) for _ in range(2))
    queue.add(batch)
    queue.add(late)
    assert [chunk.sequence for chunk in queue.next()] == [batch]
    urgent = sequences.make(40)
    queue.add(urgent)
    assert [(chunk.sequence, chunk.length) for chunk in queue.next()] == [(urgent, 40), (batch, 64)]


def test_room_is_made_for_the_head_alone_and_nobody_overtakes_it():
    queue, asked = scheduler(num_pages=4), []
    urgent, small = sequences.make(100), sequences.make(1)
    queue.add(urgent)
    queue.add(small)

    def preempt_for_admission(waiting: Sequence, prefilling: list[Sequence]) -> bool:
        assert prefilling == []
        asked.append(waiting)
        return len(asked) < 3

    assert queue.next(preempt_for_admission=preempt_for_admission) == []
    assert asked == [urgent] * 3


@pytest.mark.parametrize(
    ("chunk_size", "buckets"), [(512, (32, 128, 512)), (128, (32, 128)), (50, (32, 50)), (16, (16,)), (33, (1, 33)), (300, (40, 300))]
)
def test_every_step_fits_its_bucket_and_all_tokens_are_computed_once(chunk_size, buckets):
    random = np.random.default_rng(chunk_size)
    queue = scheduler(num_pages=200, chunk_size=chunk_size, buckets=buckets)
    computed: dict[int, list[int]] = {}
    for _ in range(400):
        if random.random() < 0.4:
            queue.add(sequences.make(int(random.choice([1, 15, 31, 32, 33, 64, 200, 500]))))
        chunks = queue.next(int(random.integers(0, 5)))
        if chunks:
            bucket, at = queue.bucket(chunks), 0
            assert bucket in buckets
            assert len(chunks) <= prefill_rows(bucket)
            for chunk in chunks:
                assert at % query_tile(bucket) == 0
                assert at + chunk.length <= bucket
                at += -(-chunk.length // QUERY_TILE) * QUERY_TILE
                assert chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
                computed.setdefault(chunk.sequence.order, []).extend(range(chunk.start, chunk.start + chunk.length))
                if chunk.is_last:
                    assert computed.pop(chunk.sequence.order) == list(range(len(chunk.sequence.token_ids)))
                    queue.done(chunk.sequence, lambda: LAST_HIDDEN)
                    assert chunk.sequence.state is SequenceState.PREFILLED
                    queue.remove(chunk.sequence)
