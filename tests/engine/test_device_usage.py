"""What each request took of the devices' time, in simulated time: the shares add up to what the devices worked."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.request import DeviceUsage, RequestContext, SamplingParams
from tests.engine.fake_device import fake_engine
from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import Clock, Driver, SimulatedDevice

STEP, TOKEN = 0.01, 0.001  # seconds of a step, and of each token in it besides


def driver(clock: Clock, meshes: str = "shared", num_pages: int = 200, **settings: object) -> tuple[Driver, list[SimulatedDevice]]:
    """And the devices of its meshes, prefill's first."""
    devices = [SimulatedDevice(clock, STEP, TOKEN) for _ in range(1 if meshes == "shared" else 2)]
    flat = {"page_size": 8, "prefill_chunk_size": 64, "prefill_buckets": (64,), "max_batch_size": 4}
    decode_devices = (0,) if meshes == "shared" else (1,)
    config = EngineConfig.of(decode_devices=decode_devices, max_model_len=400, **flat | settings)
    return Driver(fake_engine(config, num_pages, devices=devices, clock=clock)), devices


def endless(max_tokens: int, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **params)


def seconds(queue: float, prefill: float, decode: float) -> DeviceUsage:
    """To be compared with what an engine says, give or take the time that its calls take."""
    return DeviceUsage(*(pytest.approx(value, abs=1e-5) for value in (queue, prefill, decode)))


def test_a_request_alone_takes_each_step_whole(clock):
    run, _ = driver(clock)
    output = run.ask("a", [1] * 150, endless(11))
    assert output.device_usage == seconds(0, 3 * STEP + 150 * TOKEN, 10 * (STEP + TOKEN))


def test_requests_share_a_prefill_step_by_tokens_and_a_decode_step_alike(clock):
    run, _ = driver(clock)
    run.add("long", [1] * 30, endless(11))
    run.add("short", [2] * 10, endless(6))
    run.finish()
    prefill, decode = STEP + 40 * TOKEN, (STEP + 2 * TOKEN) / 2
    assert run.outputs["short"].device_usage == seconds(0, prefill / 4, 5 * decode)
    assert run.outputs["long"].device_usage == seconds(0, prefill * 3 / 4, 5 * decode + 5 * (STEP + TOKEN))


def test_a_request_that_joins_pays_for_the_steps_it_is_in(clock):
    run, _ = driver(clock, max_batch_size=2)
    run.add("old", [1] * 30, endless(60))
    while len(run.tokens("old")) < 10:
        run.step()
    output = run.ask("new", [2] * 30, endless(2))
    assert output.device_usage == seconds(0, STEP + 30 * TOKEN, (STEP + 2 * TOKEN) / 2)
    run.finish()
    assert run.outputs["old"].device_usage == seconds(0, STEP + 30 * TOKEN, 58 * (STEP + TOKEN) + (STEP + 2 * TOKEN) / 2)


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("seed", range(3))
def test_all_requests_together_take_what_the_devices_worked(clock, meshes, seed):
    random = np.random.default_rng(seed)
    run, devices = driver(clock, meshes, num_pages=40, max_batch_size=6)
    for number in range(40):
        n = int(random.choice([1, 1, 1, 3]))
        context = RequestContext(priority=int(random.choice([0, 0, 20])))
        prompt = random.integers(0, 200, int(random.integers(1, 200))).tolist()
        run.add(f"{number}", prompt, endless(int(random.integers(1, 60)), n=n), context)
        for _ in range(int(random.integers(0, 20))):
            run.step()
    run.finish()
    assert_all_free(run.engine)
    assert run.engine.stats.num_preemptions > 5
    usages = [output.device_usage for output in run.outputs.values()]
    prefill, decode = (sum(getattr(usage, name) for usage in usages) for name in ("prefill_seconds", "decode_seconds"))
    if meshes == "shared":
        assert prefill + decode == pytest.approx(devices[0].busy_seconds, rel=1e-4)
    else:
        assert decode == pytest.approx(devices[1].busy_seconds, rel=1e-4)
        # That a prefill step has ended is seen between two decode steps.
        late = run.engine.stats.num_prefill_steps * (STEP + 6 * TOKEN)
        assert devices[0].busy_seconds - 1e-3 <= prefill <= devices[0].busy_seconds + late
