from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from benchmarks import offline, workload
from benchmarks.workload import Case, Prompts, measure, prompts


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

    assert measure(Case("decode", 2, 4), 1, generate) == pytest.approx(6 / 1.5)


def test_a_batch_that_never_runs_whole_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="before the last began"):
        measure(Case("decode", 2, 1), 1, lambda batch, new_tokens: iter([[0], [0], [1], [1]]))


def test_prefill_is_timed_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        assert [len(p) for p in batch] == [512] and new_tokens == 1
        for step in ([], [0], []):
            clock.now += 1
            yield step

    assert measure(Case("prefill", 512), 1, generate) == pytest.approx(512 / 2)


def test_an_engine_that_gives_other_than_the_tokens_asked_for_is_not_measured() -> None:
    with pytest.raises(AssertionError, match=r"\[3\] tokens came"):
        measure(Case("decode", 1, 4), 1, lambda batch, new_tokens: iter([[0], [0], [0]]))


def test_engines_get_the_same_prompts_and_no_round_repeats_them() -> None:
    assert prompts(2, 8, 1) == prompts(2, 8, 1)
    rows = [tuple(p) for seed in (1, 2) for p in prompts(2, 8, seed)]
    assert len(set(rows)) == 4


def test_ratios_are_of_measurements_of_one_round() -> None:
    case = Case("decode", 8, 4)

    def answers(*rates: float) -> dict[str, list[dict[str, float]]]:
        return {case.label: [{"tokens_per_second": r, "host_seconds_per_decode_step": r * 1e-6} for r in rates]}

    measured = {"jaxinfer": answers(100, 300, 200), "slow": answers(50, 100, 100), "fast": answers(100, 200, 400)}
    (row,) = offline.summarize(measured, [case])
    assert row["tokens_per_second"] == {"jaxinfer": 200, "slow": 100, "fast": 200}
    assert [r["peer"] for r in row["ratios"]] == ["fast", "slow"]
    assert row["ratios"][0] == {"ours": "jaxinfer", "peer": "fast", "median": 1.0, "low": 0.5, "high": 1.5}
    assert offline.host_microseconds(measured, [case, Case("prefill", 128)]) == {"decode, batch 8": pytest.approx(200)}
