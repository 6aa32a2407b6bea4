"""What each request took of the devices' time, in simulated time: the shares add up to what the devices worked."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.request import DeviceUsage, RequestContext
from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import STEP_SECONDS, TOKEN_SECONDS, Driver, endless

STEP, TOKEN = STEP_SECONDS, TOKEN_SECONDS


def seconds(queue: float, prefill: float, decode: float) -> DeviceUsage:
    """To be compared with what an engine says, give or take the time that its calls take."""
    return DeviceUsage(*(pytest.approx(value, abs=1e-5) for value in (queue, prefill, decode)))


def test_a_request_alone_takes_each_step_whole(clock):
    run = Driver(clock)
    output = run.ask("a", [1] * 150, endless(11))
    assert output.device_usage == seconds(0, 3 * STEP + 150 * TOKEN, 10 * (STEP + TOKEN))


def test_requests_share_a_prefill_step_by_tokens_and_a_decode_step_alike(clock):
    run = Driver(clock)
    run.add("long", [1] * 30, endless(11))
    run.add("short", [2] * 10, endless(6))
    run.finish()
    prefill, decode = STEP + 40 * TOKEN, (STEP + 2 * TOKEN) / 2
    assert run.outputs["short"].device_usage == seconds(0, prefill / 4, 5 * decode)
    assert run.outputs["long"].device_usage == seconds(0, prefill * 3 / 4, 5 * decode + 5 * (STEP + TOKEN))


def test_a_request_that_joins_pays_for_the_steps_it_is_in(clock):
    run = Driver(clock, max_batch_size=2)
    run.add("old", [1] * 30, endless(60))
    while len(run.tokens("old")) < 10:
        run.step()
    output = run.ask("new", [2] * 30, endless(2))
    assert output.device_usage == seconds(0, STEP + 30 * TOKEN, (STEP + 2 * TOKEN) / 2)
    run.finish()
    assert run.outputs["old"].device_usage == seconds(0, STEP + 30 * TOKEN, 58 * (STEP + TOKEN) + (STEP + 2 * TOKEN) / 2)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_a_prompt_of_64_sequences_is_computed_once(clock, meshes, prefix_cache):
    """Their first tokens are sampled from what its last token left, eight at a time."""
    run = Driver(clock, meshes, max_batch_size=64, prefix_cache=prefix_cache)
    one = run.ask("one", [1] * 31, endless(3)).device_usage
    busy = run.devices[0].busy_seconds
    many = run.ask("many", [2] * 31, endless(3, n=64)).device_usage
    run.check_tokens()
    assert_all_free(run.engine)
    assert one.prefill_seconds == pytest.approx(STEP + 31 * TOKEN, abs=1e-5)
    if meshes == "shared":
        assert many.prefill_seconds == pytest.approx(STEP + 31 * TOKEN + 8 * STEP, abs=1e-4)
    else:
        assert run.devices[0].busy_seconds - busy == pytest.approx(STEP + 31 * TOKEN + 8 * STEP, abs=1e-4)


def test_many_sequences_of_a_prompt_hold_up_others_no_longer_than_a_prefill_step(clock):
    run = Driver(clock, max_batch_size=64)
    run.add("other", [1] * 10, endless(100))
    while not run.tokens("other"):
        run.step()
    run.add("many", [2] * 31, endless(3, n=63))
    longest = 0.0
    while not run.outputs["many"].is_finished:
        before = clock.now
        run.step()
        longest = max(longest, clock.now - before)
    assert longest < (STEP + 64 * TOKEN) + (STEP + 64 * TOKEN), "a whole step of prefill, and one of decode"
    run.finish()


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("seed", range(3))
def test_all_requests_together_take_what_the_devices_worked(clock, meshes, seed):
    random = np.random.default_rng(seed)
    run = Driver(clock, meshes, num_pages=40, max_batch_size=6)
    for number in range(40):
        n = int(random.choice([1, 1, 1, 3]))
        context = RequestContext(priority=int(random.choice([0, 0, 20])))
        prompt = random.integers(0, 200, int(random.integers(1, 200))).tolist()
        run.add(f"{number}", prompt, endless(int(random.integers(1, 60)), n=n), context)
        for _ in range(int(random.integers(0, 20))):
            run.step()
    run.finish()
    assert_all_free(run.engine)
    assert run.engine.stats.num_preemptions > 2
    usages = [output.device_usage for output in run.outputs.values()]
    prefill, decode = (sum(getattr(usage, name) for usage in usages) for name in ("prefill_seconds", "decode_seconds"))
    if meshes == "shared":
        assert prefill + decode == pytest.approx(run.devices[0].busy_seconds, rel=1e-4)
    else:
        assert decode == pytest.approx(run.devices[1].busy_seconds, rel=1e-4)
        # That a prefill step has ended is seen between two decode steps.
        late = run.engine.stats.num_prefill_steps * (STEP + 6 * TOKEN)
        assert run.devices[0].busy_seconds - 1e-3 <= prefill <= run.devices[0].busy_seconds + late


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_a_request_waits_from_its_arrival_to_its_first_chunk_and_no_more(clock, meshes):
    run = Driver(clock, meshes, max_batch_size=1)
    run.add("first", [1] * 20, endless(11))
    run.step()
    clock.now += 1
    run.add("second", [2] * 150, endless(50))
    arrived = clock.now
    while run.engine.stats.num_waiting:
        waited = clock.now - arrived
        run.step()
    while len(run.tokens("second")) < 20:
        run.step()
    run.add("urgent", [3] * 20, endless(30), RequestContext(priority=-10))
    run.finish()
    assert run.engine.stats.num_preemptions == 1, "and that the second waits again is nothing"
    usage = run.outputs["second"].device_usage
    assert usage.queue_seconds == pytest.approx(waited, abs=1e-4)
    assert usage.queue_seconds > 0.05


def test_sequences_of_a_request_are_told_together(clock):
    run = Driver(clock)
    run.add("a", [1] * 60, endless(11, n=3))
    run.finish()
    told = [delta.device_usage for delta in run.deltas if delta.device_usage is not None]
    assert [delta.device_usage is not None for delta in run.deltas if delta.index == 0] == [True] + [False] * 9 + [True]
    assert told[0] == seconds(0, STEP + 60 * TOKEN, 0), "at the first token, of which nothing else is known"
    for name in ("prefill_seconds", "decode_seconds"):
        amounts = [getattr(usage, name) for usage in told]
        assert amounts == sorted(amounts)
    total = run.outputs["a"].device_usage
    assert total == told[-1]
    assert total.prefill_seconds + total.decode_seconds == pytest.approx(run.devices[0].busy_seconds, rel=1e-4)
    assert total.prefill_seconds == pytest.approx((STEP + 60 * TOKEN) + STEP, abs=1e-4), "two start from all 60 tokens"


def test_who_goes_away_has_been_told_of_the_prompt(clock):
    run = Driver(clock)
    run.add("a", [1] * 100, endless(50))
    while not run.tokens("a"):
        run.step()
    assert run.outputs["a"].device_usage == seconds(0, 2 * STEP + 100 * TOKEN, 0)


def test_a_row_that_is_dropped_is_paid_by_those_beside_it(clock):
    """The step under way when a sequence is aborted."""
    run = Driver(clock)
    for name in "ab":
        run.add(name, [ord(name)] * 10, endless(30))
    while len(run.tokens("a")) < 10:
        run.step()
    before = run.devices[0].busy_seconds
    run.engine.abort("b")
    run.finish("a")
    prefill, decode = STEP + 20 * TOKEN, (STEP + 2 * TOKEN) / 2
    both = (before - prefill) / (STEP + 2 * TOKEN)
    assert run.outputs["a"].device_usage == seconds(0, prefill / 2, (both - 1) * decode + STEP + 2 * TOKEN + (29 - both) * (STEP + TOKEN))
