"""Tokens a second without a server: decode, prefill and many requests at once, in interleaved runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.machine import BackgroundLoad
from benchmarks.peers.measures import Measures
from benchmarks.worker import Answer, Worker, WorkerError
from benchmarks.workload import WorkloadCase

HOST = "host"  # the part of the report that has the host's time


def rotate(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each round begins with another engine, so that none always follows the same one."""
    start = number % len(names) if names else 0
    return [*names[start:], *names[:start]]


def measure_rates(
    workers: Mapping[str, Worker],
    work: Sequence[WorkloadCase],
    rounds: int,
    measures: Measures,
    lost: dict[str, str],
    others: BackgroundLoad,
    say: Callable[[str], None],
) -> dict[str, dict[str, Answer]]:
    """One unrecorded round of few tokens to warm up, then the rounds. An engine that fails is added to `lost`, with the
    reason. Returns what else each engine reported for each case in the last round, such as the cache it chose."""
    told: dict[str, dict[str, Answer]] = {name: {} for name in workers}
    for number, case, name in _turns(list(workers), work, rounds):
        if name in lost:
            continue
        say(f"{f'round {number} of {rounds}' if number else 'warming up'}: {case.label}, {name}")
        others.look()
        try:
            answer = workers[name].ask(case=(case if number else case.short()).as_json(), seed=number)
        except WorkerError as error:
            lost[name] = f"{case.label}: {last_line(error)}"
            continue
        if number:
            others.keep()
            told[name][case.label] = _record(measures, case, name, answer)
    return told


def _turns(names: Sequence[str], work: Sequence[WorkloadCase], rounds: int) -> Iterator[tuple[int, WorkloadCase, str]]:
    for number in range(rounds + 1):
        for case in work:
            for name in rotate(names, number):
                yield number, case, name


def _record(measures: Measures, case: WorkloadCase, name: str, answer: Answer) -> Answer:
    """Records the figures; returns the rest."""
    rate = answer.pop("tokens_per_second")
    measures.add(case.kind, case.label, "tokens/s", name, rate, is_higher_better=True)
    host = answer.pop("host_seconds_per_decode_step", None)
    if case.kind == "decode" and host is not None:
        measures.add(HOST, f"{case.label}: host time a step", "us", name, host * 1e6, is_higher_better=False)
        measures.add(HOST, f"{case.label}: its share of a step", "share", name, host * rate / case.size, is_higher_better=False)
    return answer


def last_line(error: Exception) -> str:
    """The last line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
