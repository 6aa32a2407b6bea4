"""Whose turn it is, engine and all: urgent work goes first and takes room from batch work, which starves never, in simulated time."""

from __future__ import annotations

import pytest

from jaxinfer.request import RequestContext
from jaxinfer.sequence import SequenceState
from tests.engine.fake_device import sequences_of
from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import STEP_SECONDS, TOKEN_SECONDS, Clock, Driver, endless, recorded_chunks

URGENT, INTERACTIVE, BATCH = (RequestContext(priority=priority) for priority in (-10, 0, 20))
AGEING = 3.0  # seconds
STEP = STEP_SECONDS + 64 * TOKEN_SECONDS  # seconds of a whole prefill step


def assert_all_served(run: Driver) -> None:
    """Each request has just its tokens, and nothing is left."""
    run.finish()
    run.check_tokens()
    assert_all_free(run.engine)


def run_until(run: Driver, request_id: str, num_tokens: int = 1, most_steps: int = 200) -> None:
    """Go on until a request's first sequence has that many tokens."""
    for _ in range(most_steps):
        if len(run.tokens(request_id)) >= num_tokens:
            return
        run.step()
    raise AssertionError(f"{request_id} has {len(run.tokens(request_id))} tokens after {most_steps} steps")


def seconds_to_first_token(clock: Clock, run: Driver, prompt: list[int], context: RequestContext, max_tokens: int = 20) -> float:
    """Of a request `now` that comes now."""
    started = clock.now
    run.add("now", prompt, endless(max_tokens), context)
    run_until(run, "now")
    return clock.now - started


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_interactive_work_takes_the_place_of_batch_work_and_no_more_than_it_needs(clock, meshes):
    run = Driver(clock, meshes, max_batch_size=2)
    run.add("old", [1] * 50, endless(200), BATCH)
    run.add("young", [2] * 50, endless(200), BATCH)
    run_until(run, "young", 30)
    assert seconds_to_first_token(clock, run, [3] * 20, INTERACTIVE) < 3 * STEP
    assert run.engine.stats.num_preemptions == 1
    run.finish("now")
    assert len(run.tokens("old")) > 45, "it went on"
    assert 30 <= len(run.tokens("young")) < 45, "it did not"
    assert run.engine.stats.num_preemptions == 1
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_interactive_work_takes_the_pages_of_batch_work(clock, meshes):
    run = Driver(clock, meshes, num_pages=50)
    for number in range(3):
        run.add(f"batch {number}", [number] * 100, endless(30 if number else 200), BATCH)
    run_until(run, "batch 2", 5)
    assert seconds_to_first_token(clock, run, [3] * 300, INTERACTIVE) < 6 * STEP
    run.finish("now")
    assert not run.outputs["batch 0"].is_finished
    assert_all_served(run)


def test_interactive_work_does_not_wait_for_the_decode_pages_of_batch_work(clock):
    run = Driver(clock, "two", num_pages=50)
    run.add("batch", [1] * 200, endless(190), BATCH)
    run_until(run, "batch", 100)
    run.add("now", [2] * 150, endless(20), INTERACTIVE)
    run.finish("now")
    assert not run.outputs["batch"].is_finished
    assert run.engine.stats.num_preemptions == 1
    assert_all_served(run)


def test_running_work_is_left_alone_when_its_pages_are_of_no_use(clock):
    """Prompts that are being computed hold the prefill mesh's pages: the decode mesh's do not help."""
    run = Driver(clock, "two", num_pages=80, max_batch_size=8)
    for number in range(3):
        run.add(f"batch {number}", [number] * 10, endless(100), BATCH)
    run_until(run, "batch 2", 5)
    run.add("first", [7] * 390, endless(1), INTERACTIVE)
    run.step()
    run.add("second", [8] * 320, endless(5), INTERACTIVE)
    run.step()
    assert [s.state for s in sequences_of(run.engine)][-1] is SequenceState.WAITING, "for pages"
    run.finish("second")
    assert run.engine.stats.num_preemptions == 0
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("short_of", ["slots", "pages"])
def test_urgent_work_does_not_wait_for_half_computed_batch_prompts(clock, meshes, short_of):
    limits = {"max_batch_size": 1} if short_of == "slots" else {"num_pages": 50}
    run = Driver(clock, meshes, **limits)
    with recorded_chunks(run.engine) as chunks:
        run.add("batch", [1] * 390, endless(5), BATCH)
        run.step()
        run.step()
        assert seconds_to_first_token(clock, run, [2] * 40, INTERACTIVE, 5) < 3 * STEP
        assert not run.tokens("batch")
        assert_all_served(run)
    of_batch = [(c.start, c.length) for c in chunks if c.sequence.request.request_id == "batch"]
    assert of_batch == [(start, 64) for start in range(0, 384, 64)] + [(384, 6)], "nothing of it was computed twice"


def test_requests_of_one_priority_wait_for_each_other(clock):
    run = Driver(clock, num_pages=60)
    for number in range(8):
        run.add(f"{number}", [number] * 60, endless(25))
    run.finish("0")
    assert run.engine.stats.num_preemptions == 0
    assert_all_served(run)


@pytest.mark.parametrize(("meshes", "num_pages", "max_tokens"), [("shared", 50, 19), ("two", 56, 50)])
def test_running_requests_are_left_a_page_each_to_grow_into(clock, meshes, num_pages, max_tokens):
    run = Driver(clock, meshes, num_pages=num_pages)
    for number in range(2):
        run.add(f"{number}", [number] * 86, endless(max_tokens))
    run_until(run, "1", 8)
    run.add("late", [9] * 200, endless(3))  # fits, when it comes to that, and leaves too little
    run.finish("0", "1")
    assert run.engine.stats.num_preemptions == 0
    assert_all_served(run)


def test_urgent_prompts_are_handed_over_before_those_that_were_computed_earlier(clock):
    run = Driver(clock, "two", num_pages=50)
    run.add("urgent", [1] * 250, endless(100), URGENT)
    run_until(run, "urgent", 2)
    run.add("batch", [2] * 200, endless(20), BATCH)
    run_until(run, "batch", 1)
    run.add("now", [3] * 40, endless(10), INTERACTIVE)
    run.finish("now")
    assert not run.outputs["urgent"].is_finished
    assert len(run.tokens("batch")) == 1, "of which one is prefill's: the decode mesh has no room for the rest"
    assert_all_served(run)


def test_batch_work_fills_what_is_left_and_no_more(clock):
    run = Driver(clock, max_batch_size=4)
    for number in range(8):
        run.add(f"batch {number}", [number] * 20, endless(60), BATCH)
    run_until(run, "batch 3", 5)
    for number in range(2):
        run.add(f"now {number}", [9, number], endless(30), INTERACTIVE)
    run_until(run, "now 1", 2)
    priorities = [s.context.priority for s in run.engine._components.decode.scheduler.running]
    assert sorted(priorities) == [0, 0, 20, 20]
    run.finish("now 0", "now 1")
    while run.engine.stats.num_running < 4:
        run.step()
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_each_level_is_preempted_for_those_above_it(clock, meshes):
    run = Driver(clock, meshes, max_batch_size=1)
    run.add("batch", [1] * 30, endless(60), BATCH)
    run_until(run, "batch", 10)
    run.add("interactive", [2] * 30, endless(60), INTERACTIVE)
    run_until(run, "interactive", 10)
    run.add("urgent", [3] * 30, endless(60), URGENT)
    run.add("interactive too", [4] * 30, endless(60), INTERACTIVE)
    run.finish("urgent")
    assert (len(run.tokens("batch")), len(run.tokens("interactive too"))) == (pytest.approx(10, abs=3), 0)
    assert len(run.tokens("interactive")) == pytest.approx(10, abs=3)
    assert_all_served(run)
    ended = [delta.request_id for delta in run.deltas if delta.finish_reason]
    assert ended == ["urgent", "interactive", "interactive too", "batch"]
    assert run.engine.stats.num_preemptions == 2


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize(("n_of_batch", "n_now"), [(4, 1), (1, 4), (3, 3)])
def test_sequences_of_a_request_are_preempted_and_admitted_one_by_one(clock, meshes, n_of_batch, n_now):
    run = Driver(clock, meshes, max_batch_size=4)
    run.add("batch", [1] * 60, endless(100, n=n_of_batch), BATCH)
    run_until(run, "batch", 20)
    run.add("now", [2] * 60, endless(30, n=n_now), INTERACTIVE)
    run.finish("now")
    assert run.engine.stats.num_preemptions == max(n_of_batch + n_now - 4, 0)
    assert not run.outputs["batch"].is_finished
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_preempted_work_goes_on_from_what_it_had(clock, meshes):
    run = Driver(clock, meshes, max_batch_size=1)
    with recorded_chunks(run.engine) as chunks:
        run.add("batch", [1] * 100, endless(150), BATCH)
        for number in range(4):
            run_until(run, "batch", 30 * number + 30)
            run.ask(f"{number}", [2, number], endless(5), INTERACTIVE)
        assert_all_served(run)
    assert run.engine.stats.num_preemptions == 4
    again = [c for c in chunks if c.sequence.request.request_id == "batch" and c.epoch]
    assert len(again) == 4
    assert all(chunk.length <= 8 and chunk.is_last for chunk in again), "the tokens of the last page"
    assert run.outputs["batch"].cached_tokens == 0, "what it left itself does not count"


def flood(run: Driver, number: int, num_waiting: int = 2, context: RequestContext = INTERACTIVE) -> int:
    """Keep so many requests of a kind waiting; returns the number of the next."""
    while sum(s.context == context for s in run.engine._components.prefill.scheduler.waiting) < num_waiting:
        run.add(f"{context.tenant} {number}", [number % 200, number // 200] * 10, endless(20), context)
        number += 1
    return number


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_batch_work_gets_its_turn_however_much_interactive_work_comes(clock, meshes, has_begun):
    ageing, number = 0.2, 0
    run = Driver(clock, meshes, max_batch_size=2, ageing_seconds=ageing)
    run.add("batch", [1] * 100, endless(60), BATCH)
    if has_begun:
        run_until(run, "batch", 10)
    started = clock.now
    preempted = run.engine.stats.num_preemptions
    num_before = len(run.tokens("batch"))
    while len(run.tokens("batch")) == num_before or clock.now < started + 1:
        number = flood(run, number)
        run.step()
        assert clock.now < started + 60
    aged = clock.now - started
    # 20 levels, then what is left of the flood's turn: a quantum of 64 tokens, each request of 40; and for a slot.
    assert 20 * ageing <= aged < 20 * ageing + 4 * 20 * (STEP_SECONDS + 2 * TOKEN_SECONDS) + 4 * STEP
    while not run.outputs["batch"].is_finished:
        number = flood(run, number)
        run.step()
    assert run.engine.stats.num_preemptions - preempted == has_begun, "once it has its turn it keeps it"
    assert clock.now - started < 20 * ageing + 3
    assert_all_served(run)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_pages", [52, 200])
def test_batch_work_gets_on_in_the_gaps_that_interactive_work_leaves_however_short(clock, prefix_cache, num_pages):
    """One request after the other, with a pause that lets in batch work, which is too short for its prompt."""
    run = Driver(clock, max_batch_size=1, prefix_cache=prefix_cache, num_pages=num_pages, ageing_seconds=0.2)
    run.add("batch", [1] * 340, endless(20), BATCH)
    started, number, last_ended = clock.now, 0, clock.now
    while not run.outputs["batch"].is_finished:
        assert clock.now < started + 20 * 0.2 + 3
        if not number or run.outputs[f"{number}"].is_finished:
            if clock.now > last_ended + 0.05:
                number += 1
                run.add(f"{number}", [number % 200, number // 200, 3] * 60, endless(20), INTERACTIVE)
        else:
            last_ended = clock.now
        run.step()
    assert run.engine.stats.num_preemptions >= 5
    assert_all_served(run)


def tokens_got(run: Driver) -> dict[str, int]:
    """By tenant: prompts that were computed and tokens that came of them."""
    got = {"a": 0, "b": 0}
    for request_id, output in run.outputs.items():
        if (tenant := request_id[0]) in got and output.outputs[0].token_ids:
            got[tenant] += len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    return got


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("is_preempted", [True, False])
def test_tenants_share_in_tokens_whatever_the_shape_of_their_requests(clock, meshes, prefix_cache, is_preempted):
    """Long prompts against long answers; what is computed again because others went first costs nobody."""
    run = Driver(clock, meshes, prefix_cache=prefix_cache, max_batch_size=3, ageing_seconds=1000.0)
    number, history = 0, []
    for turn in range(3000):
        for tenant, length, max_tokens in (("a", 200, 4), ("b", 10, 250)):
            context = RequestContext(tenant=tenant, priority=20)
            while sum(s.context == context for s in run.engine._components.prefill.scheduler.waiting) < 3:
                run.add(f"{tenant} {number}", [number % 200, number // 200] * (length // 2), endless(max_tokens), context)
                number += 1
        if is_preempted and turn % 20 == 0:
            run.add(f"now {number}", [number % 200, number // 200] * 5, endless(10), INTERACTIVE)
            number += 1
        run.step()
        got = tokens_got(run)
        history.append(got["a"] - got["b"])
    assert (run.engine.stats.num_preemptions > 30) == is_preempted
    # A quantum, and what runs at once, which is paid for at its end.
    assert max(map(abs, history)) < 64 + 3 * 260
