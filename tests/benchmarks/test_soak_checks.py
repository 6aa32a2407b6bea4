"""What a soak judges: each check holds where all is well and sees what isn't."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks import soak_checks as checks
from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord
from benchmarks.soak_checks import Phase
from benchmarks.soak_monitor import ServerSample
from benchmarks.soak_traffic import KINDS, SentRequest

PHASES = [Phase(None, 0, 100), Phase(1.0, 100, 200), Phase(3.0, 200, 400), Phase(1.0, 400, 500), Phase(3.0, 500, 600)]


def sample(at: float, **figures: float) -> ServerSample:
    usual = {"rss": 1000.0, "num_files": 20, "num_threads": 8, "waiting": 0, "running": 0, "pages_used": 0.0, "other_cpu": 0.0}
    counters = {"server_cpu": 1.5 * at, "output_tokens": 50 * at, "prompt_tokens": 0, "preemptions": 0, "compilations": 0}
    return ServerSample(at=at, **(usual | counters | figures))


def samples(rss=lambda at: 1000.0, rate=lambda at: 50.0) -> list[ServerSample]:
    """One a second; `rate` is of output tokens."""
    made, tokens = [], 0.0
    for at in range(601):
        made.append(sample(at, rss=rss(at), output_tokens=tokens))
        tokens += rate(at)
    return made


# Memory


def test_memory_that_comes_and_goes_is_flat():
    rng = random.Random(1)
    check = checks.memory_check(samples(rss=lambda at: 1000 + rng.choice((0, 0, 40, 80))), PHASES)
    assert check.is_met


def test_memory_that_has_grown_once_is_flat():
    assert checks.memory_check(samples(rss=lambda at: 1000 if at < 330 else 1030), PHASES).is_met


@pytest.mark.parametrize("leak", [1.5, 12])
def test_a_leak_is_seen_through_the_noise(leak):
    rng = random.Random(2)
    check = checks.memory_check(samples(rss=lambda at: 1000 + leak * at / 60 + rng.choice((0, 0, 40, 80))), PHASES)
    assert check.is_met is False
    assert float(check.figure.split()[0]) == pytest.approx(leak, rel=0.2)


def test_growth_before_every_load_was_met_is_not_held_against_it():
    assert checks.memory_check(samples(rss=lambda at: min(1000 + at, 1250)), PHASES).is_met


def test_a_short_soak_does_not_judge_memory():
    assert checks.memory_check(samples()[:120], [Phase(None, 0, 40), Phase(3.0, 40, 120)]).is_met is None


# Throughput


def rates(full: float, one: float, three: float) -> list[ServerSample]:
    def rate(at: float) -> float:
        return next((three if p.load == 3 else one if p.load == 1 else full for p in PHASES if p.start <= at < p.end), 0)

    return samples(rate=rate)


def test_throughput_under_overload_is_compared_with_the_best():
    assert checks.overload_check(rates(100, 80, 92), PHASES, 3.0, num_cores=2).is_met
    check = checks.overload_check(rates(60, 100, 85), PHASES, 3.0, num_cores=2)
    assert check.is_met is False and check.figure == "85% (85 of 100 tokens/s, at 1x load)"
    assert checks.overload_check(rates(60, 70, 85), PHASES, 3.0, num_cores=2).figure.startswith("100%")


def test_the_beginning_of_a_phase_is_not_measured():
    made = samples(rate=lambda at: 10.0 if 200 <= at < 250 else 50.0)
    assert checks.throughput(made, PHASES[2]) == pytest.approx(50.0)
    assert checks.throughput(made, Phase(3.0, 190, 270)) < 40


def test_a_load_with_several_phases_has_their_median():
    made = samples(rate=lambda at: 80.0 if at >= 500 else 40.0)
    assert checks.medians(made, PHASES, lambda s: s.output_tokens) == {"full": 40.0, "1x": 40.0, "3x": 60.0}


def test_short_phases_are_not_judged():
    assert checks.overload_check(samples(), [Phase(None, 0, 10), Phase(3.0, 10, 40)], 3.0, num_cores=2).is_met is None


def test_too_little_throughput_on_a_busy_machine_is_not_judged():
    def disturbed(made: list[ServerSample], cores: float) -> list[ServerSample]:
        return [replace(s, other_cpu=cores * max(s.at - 200, 0)) for s in made]

    check = checks.overload_check(disturbed(rates(60, 100, 50), 0.5), PHASES, 3.0, num_cores=2)
    assert check.is_met is None and "other processes took 0.5 of 2 cores" in check.figure
    assert checks.overload_check(disturbed(rates(60, 100, 50), 0.05), PHASES, 3.0, num_cores=2).is_met is False
    assert checks.overload_check(disturbed(rates(60, 100, 95), 0.5), PHASES, 3.0, num_cores=2).is_met


# Pages, sockets, compilations, answers, the end


def test_what_is_still_held_after_the_last_answer_is_lost():
    assert checks.page_check(sample(9)).is_met
    for left in ({"pages_used": 0.01}, {"waiting": 1}, {"running": 1}):
        assert checks.page_check(sample(9, **left)).is_met is False


def test_sockets_and_threads_that_stay_are_seen():
    before = sample(0)
    assert checks.handle_check(before, sample(9, num_files=22)).is_met
    assert checks.handle_check(before, sample(9, num_files=40)).is_met is False
    assert checks.handle_check(before, sample(9, num_threads=40)).is_met is False


def test_a_compilation_is_seen():
    assert checks.compilation_check(sample(9)).is_met
    assert checks.compilation_check(sample(9, compilations=1)).is_met is False


REQUEST = LoadRequest("/v1/completions", b"")


def pair(
    kind: str, outcome: LoadOutcome, status: int = 200, code: str = "", statuses: tuple[int, ...] = ()
) -> tuple[SentRequest, RequestRecord]:
    return SentRequest(kind, REQUEST, statuses), RequestRecord(0.0, outcome=outcome, status=status, code=code)


RIGHT = [
    pair("stream", LoadOutcome.ANSWERED),
    pair("stream", LoadOutcome.REFUSED, 429),
    pair("bad", LoadOutcome.REJECTED, 404, statuses=(404,)),
    pair("bad", LoadOutcome.REFUSED, 429, statuses=(400,)),
    pair("deadline", LoadOutcome.REJECTED, 408),
    pair("deadline", LoadOutcome.FAILED, 200, "timeout"),
    pair("leaves early", LoadOutcome.LEFT, 0),
    pair("leaves early", LoadOutcome.ANSWERED),
]
WRONG = [
    pair("stream", LoadOutcome.UNFINISHED, 0),
    pair("stream", LoadOutcome.BROKEN),
    pair("stream", LoadOutcome.FAILED, 500),
    pair("stream", LoadOutcome.REFUSED, 503),
    pair("stream", LoadOutcome.REJECTED, 400),
    pair("stream", LoadOutcome.FAILED, 200, "timeout"),
    pair("stream", LoadOutcome.LEFT),
    pair("deadline", LoadOutcome.FAILED, 200, "internal_error"),
    pair("bad", LoadOutcome.ANSWERED, statuses=(400,)),
    pair("bad", LoadOutcome.REJECTED, 404, statuses=(400,)),
    pair("half a body", LoadOutcome.BROKEN, 0),
]


def test_answers_and_refusals_with_a_reason_are_right():
    assert {sent.kind for sent, _ in RIGHT + WRONG} <= set(KINDS)
    check = checks.answer_check(RIGHT, {})
    assert check.is_met
    assert check.figure == "2 answered, 2 refused, 2 rejected, 1 failed, 1 left"


@pytest.mark.parametrize("wrong", WRONG, ids=lambda p: f"{p[0].kind} {p[1].outcome} {p[1].status}")
def test_anything_else_is_wrong_and_named(wrong):
    check = checks.answer_check([*RIGHT, wrong], {})
    assert check.is_met is False
    assert f"wrong: 1 {wrong[0].kind}: {wrong[1].outcome}" in check.figure


def test_a_5xx_that_no_client_waited_for_is_wrong_too():
    metrics = {'jaxinfer_http_requests_total{code="500",method="POST",route="/v1/completions"}': 1.0, "jaxinfer_requests_total": 500.0}
    assert checks.answer_check(RIGHT, metrics).is_met is False


def test_the_answer_must_be_the_one_of_before():
    def answer(text: str, outcome: LoadOutcome = LoadOutcome.ANSWERED) -> RequestRecord:
        return RequestRecord(0.0, outcome=outcome, choices=[text])

    assert checks.same_answer_check(answer("a"), answer("a")).is_met
    assert checks.same_answer_check(answer("a"), answer("b")).is_met is False
    assert checks.same_answer_check(answer("a"), answer("a", LoadOutcome.BROKEN)).is_met is False


def test_the_log_and_the_end():
    assert checks.log_check(["INFO:     Started", "WARNING:  slow", "", "an ERROR is spoken of"]).is_met
    assert checks.log_check(["INFO:     Started", "ERROR:    a request failed"]).is_met is False
    assert checks.log_check(["2026-11-22T14:11:54.123Z ERROR server: a request failed"]).is_met is False
    assert checks.log_check(["2026-11-22T14:11:54.123Z INFO server.access [a]: x POST / 400 ERROR in 0.1 s"]).is_met
    assert checks.log_check(["Traceback (most recent call last):"]).is_met is False
    assert [checks.end_check(status).is_met for status in (0, 1, None)] == [True, False, False]
