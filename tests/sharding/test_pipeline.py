"""Timelines, held against a simulation that knows nothing but the rules, a tick at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.pipeline import Timeline, round_seconds, steady_bubble_share, timeline

STAGES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def simulate(
    stages: list[int], num_micro_batches: int, num_rounds: int, move: int, back: int | None
) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(stage, micro-batch, round) -> (start, stop). Every tick each idle stage looks whether the next of its queue is there."""
    queues = [[(m, r) for r in range(num_rounds) for m in range(num_micro_batches)] for _ in stages]
    there = {(0, m, r): 0 for m in range(num_micro_batches) for r in range(num_rounds) if r == 0 or back is None}
    busy: dict[int, tuple[int, int, int]] = {}
    done: dict[tuple[int, int, int], tuple[int, int]] = {}
    now = 0
    while any(queues) or busy:
        for stage, (m, r, start) in list(busy.items()):
            if now == start + stages[stage]:
                del busy[stage]
                done[stage, m, r] = (start, now)
                if stage + 1 < len(stages):
                    there[stage + 1, m, r] = now + move
                elif back is not None:
                    there[0, m, r + 1] = now + back
        for stage, queue in enumerate(queues):
            if stage not in busy and queue and there.get((stage, *queue[0]), now + 1) <= now:
                m, r = queue.pop(0)
                busy[stage] = (m, r, now)
        now += 1
        assert now < 10_000
    return done


def by_place(line: Timeline) -> dict[tuple[int, int, int], tuple[float, float]]:
    return {(work.stage, work.micro_batch, work.round): (work.start, work.stop) for work in line.works}


@settings(deadline=None)
@given(STAGES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.none() | st.integers(0, 3))
def test_a_timeline_is_what_the_rules_give(stages: list[int], num_micro_batches: int, num_rounds: int, move: int, back: int | None) -> None:
    line = timeline(stages, num_micro_batches, num_rounds, move_seconds=move, return_seconds=back)
    done = simulate(stages, num_micro_batches, num_rounds, move, back)
    assert by_place(line) == done
    assert line.seconds == max(stop for _, stop in done.values())
    work = sum(stages) * num_micro_batches * num_rounds
    assert line.bubble_share == pytest.approx(1 - work / (len(stages) * line.seconds))
    ends = [done[len(stages) - 1, 0, r][1] for r in range(num_rounds)]
    assert line.ends(0) == ends


@settings(deadline=None)
@given(STAGES, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_a_full_pipeline_goes_at_the_pace_that_is_said(stages: list[int], num_micro_batches: int, move: int, back: int) -> None:
    """Over many rounds, and of stages' waiting what is left once filling and draining count for nothing."""
    many = 40
    line = timeline(stages, num_micro_batches, many, move_seconds=move, return_seconds=back)
    ends = line.ends(0)
    pace = round_seconds(stages, num_micro_batches, move_seconds=move, return_seconds=back)
    assert (ends[-1] - ends[many // 2 - 1]) / (many - many // 2) == pytest.approx(pace)
    waits = 1 - sum(stages) * num_micro_batches / (len(stages) * pace)
    assert steady_bubble_share(stages, num_micro_batches, move_seconds=move, return_seconds=back) == pytest.approx(waits)


def test_enough_micro_batches_leave_no_bubbles() -> None:
    assert steady_bubble_share([2.0, 2.0, 2.0], 3) == 0
    assert steady_bubble_share([2.0, 2.0, 2.0], 1) == pytest.approx(2 / 3)
    assert steady_bubble_share([2.0, 2.0], 2, move_seconds=0.5, return_seconds=0.5) == pytest.approx(1 / 5)
    assert steady_bubble_share([2.0, 2.0], 3, move_seconds=0.5, return_seconds=0.5) == 0, "one more hides the way"
    assert timeline([1.0, 1.0], 4).bubble_share == pytest.approx(1 / 5), "a pipeline fills and drains"
    assert timeline([0.0], 1).bubble_share == steady_bubble_share([0.0], 1) == 0


@pytest.mark.parametrize(("stages", "num_micro_batches", "num_rounds"), [([], 1, 1), ([1.0], 0, 1), ([1.0], 1, 0)])
def test_there_must_be_something_to_do(stages: list[float], num_micro_batches: int, num_rounds: int) -> None:
    with pytest.raises(ValueError, match="one of each at least"):
        timeline(stages, num_micro_batches, num_rounds)
