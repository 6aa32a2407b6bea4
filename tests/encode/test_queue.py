"""Every text comes once, in rows that it fits, with others of like length; and no job waits for all of another."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.encode.batch import most_texts
from jaxinfer.encode.queue import EncodeJob, EncodeQueue, widths_for


def job_of(lengths, name="job"):
    return EncodeJob(name, [np.full(length, 1, np.int32) for length in lengths], np.empty((len(lengths), 1), np.float32), 0.0)


def lengths_of(rows):
    return [[len(job.token_lists[number]) for job, number in row] for row in rows]


def drained(queue):
    batches = []
    while (taken := queue.take()) is not None:
        batches.append(taken)
    return batches


@pytest.mark.parametrize(
    ("max_tokens", "widths"),
    [
        (256, [32, 64, 128, 160, 192, 224, 256]),
        (513, [32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512, 513]),
        (70, [32, 64, 70]),
        (32, [32]),
        (10, [10]),
    ],
)
def test_widths_double_then_grow_by_quarters_up_to_the_longest_text(max_tokens, widths):
    assert widths_for(max_tokens) == widths


def test_every_width_has_whole_steps_and_some_have_single_rows():
    whole = {(8, 64), (4, 128), (3, 160), (2, 192), (2, 224), (2, 256)}
    assert set(EncodeQueue(256).shapes) == whole | {(1, 32), (1, 64), (1, 128), (1, 256)}
    assert EncodeQueue(10).shapes == [(1, 10), (51, 10)]
    assert {(1, 320), (1, 512)} <= set(EncodeQueue(512).shapes)  # a step is no more than a row


@settings(max_examples=200, deadline=None)
@given(
    max_tokens=st.sampled_from([3, 32, 70, 256, 512]),
    jobs=st.lists(st.lists(st.integers(1, 512), min_size=1, max_size=60), max_size=6),
    seed=st.integers(0, 100),
)
def test_every_text_comes_once_in_a_row_that_it_fits(max_tokens, jobs, seed):
    chance, queue = random.Random(seed), EncodeQueue(max_tokens)
    made = [job_of([min(length, max_tokens) for length in lengths], str(i)) for i, lengths in enumerate(jobs)]
    waiting, seen = list(made), Counter()
    kept = {(job, number) for job in made for number in range(len(job.token_lists))}
    while waiting or len(queue):
        if waiting and chance.random() < 0.5:
            queue.add(waiting.pop())
            continue
        if chance.random() < 0.1 and made not in ([], waiting):
            dropped = chance.choice(made)
            if dropped not in waiting:
                queue.remove(dropped)
                kept -= {(job, number) for job, number in kept if job is dropped and (job, number) not in seen}
                assert dropped.num_waiting == 0
            continue
        before, taken = len(queue), queue.take()
        if taken is None:
            assert before == 0
            continue
        (num_rows, width), rows = taken
        assert (num_rows, width) in queue.shapes
        assert 1 <= len(rows) <= num_rows
        assert all(row and sum(lengths) <= width for row, lengths in zip(rows, lengths_of(rows), strict=True))
        assert sum(map(len, rows)) <= most_texts(num_rows, width)
        assert before - len(queue) == sum(map(len, rows))
        seen.update((job, number) for row in rows for job, number in row)
    assert set(seen) == kept
    assert set(seen.values()) <= {1}
    assert all(job.num_waiting == 0 for job in made)


def test_many_texts_fill_nearly_all_places():
    lengths = np.random.default_rng(0).integers(3, 257, 400).tolist()
    queue = EncodeQueue(256)
    queue.add(job_of(lengths))
    places = sum(num_rows * width for (num_rows, width), _ in drained(queue))
    assert sum(lengths) / places > 0.92


def test_a_text_alone_takes_the_narrowest_row_and_several_a_wider_one():
    queue = EncodeQueue(256)
    for length, width in ((2, 32), (32, 32), (33, 64), (64, 64), (65, 128), (256, 256)):
        queue.add(job_of([length]))
        assert queue.take()[0] == (1, width)
    queue.add(job_of([10, 10, 10]))
    assert queue.take()[0] == (1, 32)
    queue.add(job_of([10, 10, 10, 10]))
    assert queue.take()[0] == (1, 64)
    queue.add(job_of([150, 100]))
    assert (queue.take()[0], len(queue)) == ((1, 256), 0)


def test_a_step_is_taken_whole_where_most_of_it_is_used_and_row_by_row_where_not():
    queue = EncodeQueue(256)
    queue.add(job_of([128] * 3))
    assert [(shape, lengths_of(rows)) for shape, rows in drained(queue)] == [((4, 128), [[128], [128], [128]])]
    queue.add(job_of([128] * 2))
    assert [(shape, lengths_of(rows)) for shape, rows in drained(queue)] == [((1, 128), [[128]])] * 2


def test_long_texts_come_first_and_short_ones_fill_their_rows():
    queue = EncodeQueue(256)
    queue.add(job_of([3, 250, 60, 220, 4, 5]))
    assert [(shape, lengths_of(rows)) for shape, rows in drained(queue)] == [((2, 256), [[250, 5], [220, 4, 3]]), ((1, 64), [[60]])]
    queue.add(job_of([150] * 3 + [190, 185]))
    assert [shape for shape, _ in drained(queue)] == [(2, 192), (3, 160)]


def test_jobs_take_turns_whatever_their_size():
    queue = EncodeQueue(256)
    large, other, small = job_of([256] * 200, "large"), job_of([250] * 100, "other"), job_of([9], "small")
    for job in (large, other, small):
        queue.add(job)
    batches = [queue.take()[1] for _ in range(3)]
    firsts = [rows[0][0].job for rows in batches]
    assert firsts == [large, other, small]
    assert small.num_waiting == 0
    assert queue.take()[1][0][0].job is large


def test_of_equally_long_texts_the_oldest_goes_first():
    queue = EncodeQueue(256)
    jobs = [job_of([256], str(number)) for number in range(5)]
    for job in jobs:
        queue.add(job)
    order = [place.job for _, rows in drained(queue) for row in rows for place in row]
    assert order[:2] == jobs[:2]
    assert set(order) == set(jobs)
