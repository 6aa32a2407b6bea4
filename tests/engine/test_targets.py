"""Latency targets, engine and all: steps follow them, and what held them is counted right, in simulated time."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import STEP_SECONDS, TOKEN_SECONDS, Clock, Driver, endless, recorded_chunks

BUCKETS = (32, 64, 128, 256)  # steps of 42, 74, 138 and 266 ms, and a decode step of the two that run takes 12 ms


class Times:
    """When each sequence's tokens came, told apart from the engine's own books."""

    def __init__(self, clock: Clock, run: Driver) -> None:
        self.clock, self.run = clock, run
        self.arrivals: dict[str, float] = {}
        self.tokens: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **params: object) -> None:
        self.arrivals[request_id] = self.clock.now
        self.run.add(request_id, prompt, endless(max_tokens, **params))

    def step(self) -> None:
        for delta in self.run.step():
            for _ in delta.token_ids:
                self.tokens[delta.request_id, delta.index].append(self.clock.now)

    def go_on(self, condition=lambda: False) -> None:
        for _ in range(5000):
            if condition() or not self.run.engine.has_work:
                return
            self.step()
        raise AssertionError("no end")

    def gaps(self, *request_ids: str, since: float = 0.0) -> list[float]:
        return [
            after - before
            for (request_id, _), times in self.tokens.items()
            for before, after in pairwise(times)
            if request_id in request_ids and before >= since
        ]

    def firsts(self, request_ids: str = "") -> list[float]:
        """Seconds to the first token of all sequences, or of those whose request's id begins so."""
        return [times[0] - self.arrivals[key[0]] for key, times in self.tokens.items() if key[0].startswith(request_ids)]


def start(clock: Clock, meshes: str = "shared", **targets: float) -> tuple[Driver, Times]:
    """An engine that has measured its steps, as at a real one's start, and decodes two sequences."""
    sizes = {"max_batch_size": 8, "prefill_buckets": BUCKETS, "prefill_chunk_size": BUCKETS[-1], "max_model_len": 800}
    run = Driver(clock, meshes, num_pages=400, **sizes, **targets)
    for bucket in BUCKETS:
        run.engine._components.prefill.chunk_controller.observe(bucket, STEP_SECONDS + bucket * TOKEN_SECONDS)
    times = Times(clock, run)
    times.add("first", [1] * 20, 400)
    times.add("second", [2] * 6, 400)
    times.go_on(lambda: all(len(times.tokens[name, 0]) > 5 for name in ("first", "second")))
    return run, times


def prompts_arrive(run: Driver, times: Times, lengths: tuple[int, ...] = (300, 200)) -> tuple[list[int], list[float]]:
    """The sizes of the prefill steps until these prompts have their first tokens, and the running ones' times between tokens meanwhile."""
    since = times.clock.now
    names = [f"prompt {len(times.arrivals) + number}" for number in range(len(lengths))]
    with recorded_chunks(run.engine) as chunks:
        sizes = []
        for name, length in zip(names, lengths, strict=True):
            times.add(name, [len(times.arrivals)] * length, 20)
        while not all(times.tokens[name, 0] for name in names):
            before = len(chunks)
            times.step()
            sizes += [sum(chunk.length for chunk in chunks[before:])] * (len(chunks) > before)
    return sizes, times.gaps("first", "second", since=since)


def check_books(run: Driver, times: Times) -> None:
    """The engine counted what the clock saw, to the last one."""
    times.go_on()
    run.check_tokens()
    assert_all_free(run.engine)
    stats, schedule = run.engine.stats, run.engine.config.schedule
    firsts, gaps = times.firsts(), times.gaps(*times.arrivals)
    assert stats.time_to_first_token.num_observed == len(firsts)
    assert stats.inter_token_latency.num_observed == len(gaps)
    limits = [float("inf") if target is None else target for target in (schedule.target_ttft, schedule.target_itl)]
    assert stats.num_first_tokens_in_time == sum(seconds <= limits[0] for seconds in firsts)
    assert stats.num_gaps_in_time == sum(seconds <= limits[1] for seconds in gaps)


def test_without_targets_steps_are_whole(clock):
    run, times = start(clock)
    sizes, gaps = prompts_arrive(run, times)
    assert sizes[0] == 256
    assert max(gaps) > 0.25
    check_books(run, times)
    assert run.engine.stats.targets() == {}


@pytest.mark.parametrize(("target", "largest"), [(0.35, 256), (0.17, 128), (0.145, 64), (0.1, 64), (0.06, 32)])
def test_a_target_between_tokens_that_can_be_held_is_held_by_the_largest_steps_that_do(clock, target, largest):
    run, times = start(clock, target_itl=target)
    sizes, gaps = prompts_arrive(run, times, (256,) * 4)
    assert largest / 2 < max(sizes) <= largest
    assert sum(sizes) == 1024
    assert max(gaps) <= target
    check_books(run, times)
    stats = run.engine.stats
    num_missed = stats.inter_token_latency.num_observed - stats.num_gaps_in_time
    assert num_missed <= 4, "the first of each new request is two turns long: it joins the batch a turn after its first token"


def test_a_target_below_what_any_step_takes_gets_the_smallest_steps_and_an_honest_count(clock):
    run, times = start(clock, target_itl=0.02)
    sizes, gaps = prompts_arrive(run, times, (300,))
    assert set(sizes[:-1]) == {32}
    assert max(gaps) < 0.07
    assert run.engine.stats.targets()["itl"][1] < 1
    check_books(run, times)


def test_a_loose_target_to_the_first_token_makes_steps_small_and_time_that_runs_out_large(clock):
    run, times = start(clock, target_ttft=1.5)
    sizes, _ = prompts_arrive(run, times, (300,))
    assert set(sizes[:-1]) == {32}, "in 10 steps of 54 ms"
    times.go_on(lambda: run.engine.stats.num_running == 2)
    sizes, _ = prompts_arrive(run, times, (300, 299, 298, 297))
    assert max(sizes) > 32, "38 steps take 2.3 s"
    assert times.firsts("prompt 3")[0] <= 1.5
    check_books(run, times)


def test_a_target_to_the_first_token_that_can_be_held_is_held(clock):
    run, times = start(clock, target_ttft=0.75)
    for number in range(12):  # a prompt now and then, of every length
        since = clock.now
        times.add(f"prompt {number}", [20 + number] * (25 * number + 10), 10)
        times.go_on(lambda since=since: clock.now > since + 0.6)
    assert max(times.firsts()) <= 0.75
    check_books(run, times)
    assert run.engine.stats.targets()["ttft"] == (0.75, 1.0)


def test_where_both_can_not_be_held_it_is_the_one_of_those_that_run(clock):
    run, times = start(clock, target_ttft=0.3, target_itl=0.1)
    sizes, gaps = prompts_arrive(run, times)
    assert max(sizes) <= 64
    assert max(gaps) <= 0.1
    assert max(times.firsts("prompt")) > 0.3
    check_books(run, times)
    held = run.engine.stats.targets()
    assert held["ttft"][1] < 1
    assert held["itl"][1] > 0.95


def test_several_short_prompts_count_as_whole_tiles(clock):
    """Six of 5 tokens are 30 tokens, but six steps of 32: 0.4 s."""
    run, times = start(clock, target_ttft=0.3)
    sizes, _ = prompts_arrive(run, times, (5,) * 6)
    assert len(sizes) < 6
    assert max(times.firsts("prompt")) <= 0.3
    check_books(run, times)


def test_on_two_meshes_steps_are_whole_for_nobody_waits_for_them(clock):
    run, times = start(clock, "two", target_ttft=9.0, target_itl=0.1)
    sizes, gaps = prompts_arrive(run, times)
    assert sizes[0] == 256
    assert max(gaps) <= 0.1
    check_books(run, times)


def test_each_of_n_sequences_has_a_first_token_of_its_own(clock):
    run, times = start(clock, target_ttft=0.4, target_itl=0.2)
    times.add("several", [9] * 40, 10, n=4)
    check_books(run, times)
    assert len(times.firsts("several")) == 4
