import numpy as np
import pytest

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.prefill.scheduler import Chunk, PrefillScheduler
from jaxinfer.runtime.buckets import QUERY_TILE, prefill_rows, query_tile
from jaxinfer.sequence import SequenceState, SharedPrefix
from tests import sequences


def scheduler(num_pages: int = 1000, chunk_size: int = 128, buckets: tuple[int, ...] = (32, 128)) -> PrefillScheduler:
    return PrefillScheduler(KVManager(PageSpec(1, 1, 1, 16, 4), num_pages + 1), chunk_size, buckets)


def shape(chunks: list[Chunk]) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.length, chunk.is_last) for chunk in chunks]


def test_first_come_first_served_within_the_budget_of_whole_tiles():
    queue = scheduler()
    for length in (40, 10, 50, 5):
        queue.add(sequences.make(length))
    # 40 tokens use up two tiles, 10 one, and one tile is left for part of 50.
    assert shape(queue.schedule(9, 0)) == [(0, 40, True), (0, 10, True), (0, 32, False)]
    assert shape(queue.schedule(9, 0)) == [(32, 18, True), (0, 5, True)]
    assert queue.schedule(9, 0) == []


def test_long_prompts_go_in_chunks():
    queue = scheduler()
    queue.add(sequences.make(300))
    assert [shape(queue.schedule(9, 0)) for _ in range(4)] == [[(0, 128, False)], [(128, 128, False)], [(256, 44, True)], []]


def test_admission_stops_at_slots_rows_and_pages():
    queue = scheduler(chunk_size=512, buckets=(512,))
    for _ in range(12):
        queue.add(sequences.make(3))
    assert len(queue.schedule(2, 0)) == 2
    assert len(queue.schedule(99, 0)) == prefill_rows(512) == 8
    few = scheduler(num_pages=5)
    for length in (33, 1, 1):
        few.add(sequences.make(length))
    assert len(few.schedule(9, keep_free=2)) == 1, "3 pages of 5, and 2 are to stay free"
    assert len(few.schedule(9, keep_free=1)) == 1
    assert len(few.waiting) == 1


def test_none_overtakes_the_oldest_that_waits():
    queue = scheduler(num_pages=4)
    queue.add(sequences.make(100))
    queue.add(sequences.make(1))
    assert queue.schedule(9, 0) == []


def test_a_sequence_gets_pages_for_its_whole_prompt_and_gives_them_back():
    queue, sequence = scheduler(num_pages=20), sequences.make(300)
    queue.add(sequence)
    queue.schedule(9, 0)
    assert len(sequence.prefill_pages) == 19
    assert sequence.state is SequenceState.PREFILLING
    queue.remove(sequence)
    assert sequence.prefill_pages == []
    assert queue.prefilling == []
    other = sequences.make(320)
    queue.add(other)
    assert shape(queue.schedule(9, 0)) == [(0, 128, False)]


def test_a_preempted_sequence_goes_before_those_that_came_later():
    queue, old, middle, young = scheduler(), *(sequences.make(1) for _ in range(3))
    queue.add(old)
    queue.add(young)
    queue.add_back(middle)
    assert list(queue.waiting) == [old, middle, young]
    queue.waiting.clear()
    queue.add_back(young)
    queue.add_back(old)
    assert list(queue.waiting) == [old, young]


def test_a_chunk_of_an_earlier_epoch_is_not_current():
    queue, sequence = scheduler(), sequences.make(10)
    queue.add(sequence)
    [chunk] = queue.schedule(9, 0)
    assert chunk.is_current
    queue.remove(sequence)
    sequence.state, sequence.epoch, sequence.num_computed = SequenceState.WAITING, 1, 0
    assert not chunk.is_current
    queue.add_back(sequence)
    [again] = queue.schedule(9, 0)
    assert again.is_current
    assert not chunk.is_current


def test_siblings_wait_for_the_first_and_start_from_its_pages():
    queue, prefix = scheduler(), SharedPrefix(num_sharers=2)
    first, *siblings = (sequences.make(40, index=index, prefix=prefix, n=3) for index in range(3))
    for sequence in (first, *siblings):
        queue.add(sequence)
    assert [chunk.sequence for chunk in queue.schedule(9, 0)] == [first]
    assert queue.schedule(9, 0) == []
    queue._manager.share(prefix, first.prefill_pages, 40)
    chunks = queue.schedule(9, 0)
    assert [chunk.sequence for chunk in chunks] == siblings
    assert shape(chunks) == [(32, 8, True)] * 2
    assert [sibling.num_cached for sibling in siblings] == [32, 32]
    assert {tuple(sequence.prefill_pages[:2]) for sequence in (first, *siblings)} == {tuple(first.prefill_pages[:2])}
    assert len({sequence.prefill_pages[2] for sequence in (first, *siblings)}) == 3


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
        chunks = queue.schedule(int(random.integers(0, 5)), 0)
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
                    queue.done(chunk.sequence)
                    assert chunk.sequence.state is SequenceState.PREFILLED
                    queue.remove(chunk.sequence)
