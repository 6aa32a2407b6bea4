"""Which workers the router chooses, without any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.disaggregated.routing import Machines, RoutingSimulation, TracedRequest, ways
from server.router.policy import RoutedRequest, RoutingSettings, WorkerView, choose

PREFILL = WorkerView("p", "prefill", 0, 0, 8)
DECODE = WorkerView("d", "decode", 0, 0, 8)
BOTH = WorkerView("b", "both", 0, 0, 8)
LONG, SHORT = RoutedRequest(8000), RoutedRequest(20)


def chosen(*workers: WorkerView, request: RoutedRequest = LONG, **settings: bool) -> tuple[str, str | None]:
    choice = choose(workers, request, settings=RoutingSettings(**settings))
    assert choice is not None
    return choice.decode, choice.prefill


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ((PREFILL, DECODE), ("d", "p")),
        ((PREFILL,), ("p", None)),  # nobody else is left
        ((DECODE,), ("d", None)),
        ((BOTH, replace(BOTH, worker_id="c", num_sequences=8)), ("b", None)),
        ((PREFILL, replace(PREFILL, worker_id="q", num_tokens=9000), DECODE), ("d", "p")),
        ((replace(PREFILL, num_tokens=200_000), DECODE), ("d", None)),  # a queue of twenty seconds
        ((PREFILL, replace(PREFILL, worker_id="q", num_tokens=9000, num_cached=7900), DECODE), ("d", "q")),
        ((replace(PREFILL, tokens_per_second=1e3), replace(PREFILL, worker_id="q", tokens_per_second=2e3), DECODE), ("d", "q")),
        ((PREFILL, replace(DECODE, num_cached=7990)), ("d", None)),
        ((replace(BOTH, num_sequences=8, tokens_per_second=2e4), BOTH), ("b", None)),  # who only prefills there waits for a place too
        ((PREFILL, replace(DECODE, num_sequences=16), replace(DECODE, worker_id="e", num_sequences=3)), ("e", "p")),
    ],
)
def test_long_prompts(workers: tuple[WorkerView, ...], expected: tuple[str, str | None]) -> None:
    assert chosen(*workers) == expected


def test_what_is_quickly_computed_stays_where_it_is_decoded() -> None:
    assert chosen(PREFILL, DECODE, request=SHORT) == ("d", None)
    assert chosen(PREFILL, DECODE, request=SHORT, always_apart=True) == ("d", "p")
    assert chosen(PREFILL, DECODE, request=replace(LONG, may_move=False)) == ("d", None)
    slow = replace(DECODE, bytes_per_second=1e8)  # who does both would be the better one to decode, but alone can prefill for it
    assert chosen(BOTH, slow, request=SHORT, always_apart=True) == ("d", "b")


def test_pages_that_take_longer_than_computing_are_not_moved() -> None:
    """10 KB a token at 1 MB/s: 80 s."""
    assert chosen(PREFILL, replace(DECODE, bytes_per_second=1e6), request=replace(LONG, bytes_per_token=10_000)) == ("d", None)


def test_what_another_worker_has_is_fetched_where_that_is_quicker() -> None:
    """Of two workers that do both one has the prefix, and its batch is full."""
    has = replace(BOTH, worker_id="h", num_cached=7900, num_elsewhere=7900, num_sequences=8)
    free = replace(BOTH, num_elsewhere=7900)
    for bytes_per_token, is_fetched, num_new in ((10_000, True, 100), (10_000_000, False, 8000)):
        choice = choose([has, free], replace(LONG, bytes_per_token=bytes_per_token, may_move=False))
        assert choice is not None
        assert (choice.decode, choice.is_fetched, choice.num_new_tokens) == (("b", True, 100) if is_fetched else ("h", False, 100)), num_new


def test_a_session_stays_until_its_worker_has_too_much_to_do() -> None:
    other = replace(PREFILL, worker_id="q", num_tokens=1000)
    session = replace(LONG, favourite="q")
    assert chosen(PREFILL, other, DECODE, request=session) == ("d", "q")
    assert chosen(PREFILL, replace(other, num_tokens=100_000), DECODE, request=session) == ("d", "p")


def test_a_worker_that_was_lost_is_asked_last_and_one_that_drains_never() -> None:
    assert choose([DECODE], LONG, ["d"]) is None
    assert choose([replace(BOTH, role="draining")], LONG) is None
    choice = choose([DECODE, BOTH], SHORT, ["b"])
    assert choice is not None and choice.decode == "d"


def test_one_hot_prefix_melts_no_worker() -> None:
    """Two workers' worth of requests with the same beginning: what affinity alone makes of them, and the policy."""
    common = [number.to_bytes(16, "little") for number in range(16)]
    burst = [TracedRequest(n / 40, 16 * 512 + 400, 50, (*common, (n + 100).to_bytes(16, "little"))) for n in range(400)]
    machines = Machines(number=4)
    found = {name: RoutingSimulation(name, way, machines).play(burst) for name, way in ways(machines).items()}
    router, greedy, turns = found["this router"], found["affinity alone"], found["round robin"]
    assert router.most_busy < 3.0 < greedy.most_busy
    assert router.quantile(0.9) < greedy.quantile(0.9) / 3
    assert router.hit_rate > turns.hit_rate
