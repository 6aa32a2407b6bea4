from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from benchmarks import workload
from benchmarks.workload import Prompts, WorkloadCase, measure, prompts


class Clock:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(workload.time, "perf_counter", lambda: self.now)


def test_decode_is_timed_while_the_whole_batch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        # A chunk of prefill a step at first (10 s each), one sequence decoding meanwhile; 0.5 s a step; one left at the end (10 s).
        assert [len(p) for p in batch] == [workload.DECODE_PROMPT_TOKENS] * 2 and new_tokens == 5
        for seconds, step in [(10, []), (10, [0]), (10, [0, 1]), (0.5, [0, 1]), (0.5, [0, 1]), (0.5, [0, 1]), (10, [1])]:
            clock.now += seconds
            yield step

    assert measure(WorkloadCase("decode", 2, 4), 1, generate) == pytest.approx(6 / 1.5)


def test_a_batch_that_never_runs_whole_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="before the last began"):
        measure(WorkloadCase("decode", 2, 1), 1, lambda batch, new_tokens: iter([[0], [0], [1], [1]]))


def test_prefill_is_timed_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        assert [len(p) for p in batch] == [512] and new_tokens == 1
        for step in ([], [0], []):
            clock.now += 1
            yield step

    assert measure(WorkloadCase("prefill", 512), 1, generate) == pytest.approx(512 / 2)


def test_an_engine_that_gives_other_than_the_tokens_asked_for_is_not_measured() -> None:
    with pytest.raises(AssertionError, match=r"\[3\] tokens came"):
        measure(WorkloadCase("decode", 1, 4), 1, lambda batch, new_tokens: iter([[0], [0], [0]]))


def test_engines_get_the_same_prompts_and_no_round_repeats_them() -> None:
    assert prompts(2, 8, 1) == prompts(2, 8, 1)
    rows = [tuple(p) for seed in (1, 2) for p in prompts(2, 8, seed)]
    assert len(set(rows)) == 4


def test_throughput_is_of_all_tokens_over_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        assert [len(p) for p in batch] == [64, 64] and new_tokens == 2
        for seconds, step in [(4, []), (1, [0]), (1, [0]), (1, [1]), (1, [1])]:
            clock.now += seconds
            yield step

    assert measure(WorkloadCase("throughput", 2, 2, 64), 1, generate) == pytest.approx(4 / 8)


def test_prompts_keep_to_the_token_ids_they_are_given() -> None:
    case = WorkloadCase("decode", 4, 1, 200, token_ids=(5, 9))
    seen: set[int] = set()

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        seen.update(token for prompt in batch for token in prompt)
        yield from [range(4)] * new_tokens

    measure(case, 1, generate)
    assert seen == {5, 6, 7, 8}


def test_a_case_survives_json() -> None:
    case = WorkloadCase("throughput", 64, 128, 64)
    assert measure(WorkloadCase(**case.as_json()), 3, lambda batch, new: iter([range(64)] * new)) > 0
    assert WorkloadCase(**case.as_json()).label == case.label
