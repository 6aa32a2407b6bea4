from __future__ import annotations

from typing import Any

import pytest

from benchmarks.machine import BackgroundLoad
from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import HOST, measure_rates
from benchmarks.worker import WorkerError
from benchmarks.workload import WorkloadCase


class FakeWorker:
    """Answers with given rates, one a question; fails where there is none left."""

    def __init__(self, *rates: float, host: float | None = None) -> None:
        self.rates, self.host = list(rates), host
        self.asked: list[dict[str, Any]] = []

    def ask(self, **question: Any) -> dict[str, Any]:
        self.asked.append(question)
        if not self.rates:
            raise WorkerError("its last words:\nout of memory")
        return {"tokens_per_second": self.rates.pop(0), "host_seconds_per_decode_step": self.host, "cache": f"number {len(self.asked)}"}


def run(
    workers: dict[str, Any], work: list[WorkloadCase], rounds: int, told: dict[str, Any] | None = None
) -> tuple[Measures, dict[str, str], list[str]]:
    measures, lost, said = Measures(), {}, []
    found = measure_rates(workers, work, rounds, measures, lost, BackgroundLoad(), said.append)
    if told is not None:
        told.update(found)
    return measures, lost, said


def test_the_warm_up_is_short_and_not_recorded() -> None:
    worker = FakeWorker(1, 200, 300)
    measures, _, _ = run({"a": worker}, [WorkloadCase("decode", 8, 64)], 2)
    assert [question["case"]["new_tokens"] for question in worker.asked] == [8, 64, 64]
    assert [question["seed"] for question in worker.asked] == [0, 1, 2]
    assert measures.of("decode")[0].values == {"a": [200, 300]}


def test_engines_take_turns_in_changing_order() -> None:
    _, _, said = run({name: FakeWorker(1, 1, 1) for name in ("a", "b")}, [WorkloadCase("prefill", 128)], 2)
    assert [line[-1] for line in said] == ["a", "b", "b", "a", "a", "b"]


def test_an_engine_that_fails_is_lost_with_its_reason_and_the_others_go_on() -> None:
    measures, lost, _ = run({"a": FakeWorker(1, 2, 3), "b": FakeWorker(1, 2)}, [WorkloadCase("prefill", 128)], 2)
    assert lost == {"b": "prefill, 128 tokens: out of memory"}
    assert measures.of("prefill")[0].values == {"a": [2, 3], "b": [2]}


def test_host_time_is_of_decode_steps_with_its_share_of_one() -> None:
    work = [WorkloadCase("decode", 8, 64), WorkloadCase("prefill", 128)]
    measures, _, _ = run({"ours": FakeWorker(1, 1, 400, 1000, host=1e-3), "peer": FakeWorker(1, 1, 400, 1000)}, work, 1)
    time, share = measures.of(HOST)
    assert time.values == {"ours": [pytest.approx(1000)]}
    # 400 tokens a second in steps of 8 are 50 steps a second: 1 ms of 20.
    assert share.values == {"ours": [pytest.approx(0.05)]}


def test_what_an_engine_chose_is_told() -> None:
    told: dict[str, Any] = {}
    run({"a": FakeWorker(1, 2, 3)}, [WorkloadCase("prefill", 128)], 2, told)
    assert told == {"a": {"prefill, 128 tokens": {"cache": "number 3"}}}
