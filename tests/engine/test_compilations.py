"""Nothing compiles once the engine is ready, whatever it is asked for; and what does compile is counted."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from tests.conftest import TINY
from tests.engine.test_builder import NUM_OF_ONE_SIZE
from tests.engine.test_token_equality import LAYOUTS, chosen
from tests.engine.workload import workload

PROMPTS, KINDS = workload()


def use_every_feature(llm: LLM) -> None:
    engine = llm.engine
    extra = SamplingParams(max_tokens=30, n=3, echo=True, logprobs=20, prompt_logprobs=20, stop=("zz",), stop_token_ids=(5,), min_tokens=4)
    everything = [*KINDS[:8], extra, SamplingParams(max_tokens=0, prompt_logprobs=1), SamplingParams(max_tokens=None, seed=4)]
    for number, prompt in enumerate(PROMPTS):  # of every length
        engine.add_request(f"{number}", prompt, everything[number % len(everything)])
        engine.step()
    for number in range(0, len(PROMPTS), 4):
        engine.abort(f"{number}")
        engine.step()
    while engine.has_work:
        engine.step()
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))  # to the context's end
    penalised = SamplingParams(max_tokens=200, ignore_eos=True, presence_penalty=1.0, logprobs=1)
    llm.generate([prompt[:100] for prompt in PROMPTS if len(prompt) >= 100], penalised)  # more than the pages hold: some are preempted
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=3))  # the smallest buckets
    llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=3))
    llm.logprobs(PROMPTS[12])  # a length of its own: compiles, as is expected


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize(
    "layout",
    [
        *chosen(["one device", "two devices", "chunks of 50"]),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("two meshes of two", "one device to two")),
    ],
)
def test_nothing_compiles_after_ready(llms, layout):
    llm = llms(**LAYOUTS.get(layout, {}))
    stats = llm.engine.stats
    llm.engine.step()
    before, preempted = stats.num_compilations_after_ready, stats.num_preemptions
    use_every_feature(llm)
    assert stats.num_compilations_after_ready == before
    assert stats.num_preemptions > preempted


def test_an_engine_starts_with_the_counter_at_zero(llms):
    assert llms(**LAYOUTS["two devices"]).engine.stats.num_programs == NUM_OF_ONE_SIZE + 8
    assert LLM(config=llms().engine.config).engine.stats.num_compilations_after_ready == 0


def compile_something(size):
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(size)).block_until_ready()


def test_a_compilation_in_a_step_is_counted(llm, monkeypatch):
    engine, launch = llm.engine, llm.engine._steps.launch
    before, compiled = engine.stats.num_compilations_after_ready, engine.stats.num_compilations
    monkeypatch.setattr(engine._steps, "launch", lambda: (compile_something(17), launch())[1])
    engine.step()
    assert engine.stats.num_compilations_after_ready > before
    assert engine.stats.num_compilations >= compiled
    engine.stats.num_compilations_after_ready = before  # the engine is shared with other tests


def test_what_the_caller_compiles_between_steps_is_not_the_engines(llm):
    before = llm.engine.stats.num_compilations_after_ready
    compile_something(19)
    llm.engine.step()
    assert llm.engine.stats.num_compilations_after_ready == before


def test_smaller_buckets_follow_in_the_background(tiny_model_path):
    """Served at once with each role's largest, without a compilation in the engine's thread, the same tokens before and after."""
    settings = TINY | {"max_batch_size": 8, "decode_buckets": (2, 8), "prefill_buckets": (32, 64), "prefill_chunk_size": 64}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [list(range(3, 3 + length)) for length in (5, 40, 100)]
    whole = LLM(str(tiny_model_path), **settings)
    wanted = [output.outputs[0].token_ids for output in whole.generate(prompts, params)]
    llm = LLM(str(tiny_model_path), **settings, ready_when="first")
    roles, later = (llm.engine._components.prefill, llm.engine._components.decode), llm.engine._components.later
    deadline = time.monotonic() + 120
    while later.num_left and time.monotonic() < deadline:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == wanted
    assert [role.worker.runner.buckets for role in roles] == [(32, 64), (2, 8)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == wanted
    assert llm.engine.stats.num_compilations_after_ready == 0
    assert llm.engine.stats.num_programs == whole.engine.stats.num_programs
