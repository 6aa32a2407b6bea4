"""Whose turn it is, engine and all: urgent work goes first and takes room from batch work, which starves never, in simulated time."""

from __future__ import annotations

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.request import RequestContext, SamplingParams
from jaxinfer.sequence import SequenceState
from tests.engine.fake_device import expected_tokens, fake_engine, sequences_of
from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import Clock, Driver, SimulatedDevice, recorded_chunks

URGENT, INTERACTIVE, BATCH = (RequestContext(priority=priority) for priority in (-10, 0, 20))
AGEING = 3.0  # seconds
MAX_MODEL_LEN = 400
STEP = 0.01 + 64 * 0.001  # seconds of a whole prefill step


def driver(clock: Clock, meshes: str = "shared", num_pages: int = 200, **settings: object) -> Driver:
    devices = [SimulatedDevice(clock) for _ in range(1 if meshes == "shared" else 2)]
    flat = {"page_size": 8, "prefill_chunk_size": 64, "prefill_buckets": (64,), "max_batch_size": 4, "ageing_seconds": AGEING}
    decode_devices = (0,) if meshes == "shared" else (1,)
    config = EngineConfig.of(decode_devices=decode_devices, max_model_len=MAX_MODEL_LEN, **flat | settings)
    return Driver(fake_engine(config, num_pages, devices=devices, clock=clock))


def endless(max_tokens: int, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **params)


def assert_all_served(run: Driver) -> None:
    """Each request has just its tokens, and nothing is left."""
    run.finish()
    for request_id, output in run.outputs.items():
        for index in range(len(output.outputs)):
            expected = expected_tokens(output.prompt_token_ids, run.params[request_id], index, MAX_MODEL_LEN)
            assert run.tokens(request_id, index) == expected
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
    run = driver(clock, meshes, max_batch_size=2)
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
    run = driver(clock, meshes, num_pages=50)
    for number in range(3):
        run.add(f"batch {number}", [number] * 100, endless(30 if number else 200), BATCH)
    run_until(run, "batch 2", 5)
    assert seconds_to_first_token(clock, run, [3] * 300, INTERACTIVE) < 6 * STEP
    run.finish("now")
    assert not run.outputs["batch 0"].is_finished
    assert_all_served(run)


def test_interactive_work_does_not_wait_for_the_decode_pages_of_batch_work(clock):
    run = driver(clock, "two", num_pages=50)
    run.add("batch", [1] * 200, endless(190), BATCH)
    run_until(run, "batch", 100)
    run.add("now", [2] * 150, endless(20), INTERACTIVE)
    run.finish("now")
    assert not run.outputs["batch"].is_finished
    assert run.engine.stats.num_preemptions == 1
    assert_all_served(run)


def test_running_work_is_left_alone_when_its_pages_are_of_no_use(clock):
    """Prompts that are being computed hold the prefill mesh's pages: the decode mesh's do not help."""
    run = driver(clock, "two", num_pages=80, max_batch_size=8)
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
    run = driver(clock, meshes, **limits)
    with recorded_chunks(run.engine) as chunks:
        run.add("batch", [1] * 390, endless(5), BATCH)
        run.step()
        run.step()
        assert seconds_to_first_token(clock, run, [2] * 40, INTERACTIVE, 5) < 3 * STEP
        assert not run.tokens("batch")
        assert_all_served(run)
    of_batch = [(c.start, c.length) for c in chunks if c.sequence.request.request_id == "batch"]
    assert of_batch == [(start, 64) for start in range(0, 384, 64)] + [(384, 6)], "nothing of it was computed twice"
