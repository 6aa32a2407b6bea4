"""The same tokens, greedy and sampled, however the engine is laid out and whatever happens on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine import Engine
from jaxinfer.llm import LLM
from jaxinfer.request import RequestContext, RequestOutput, SamplingParams
from jaxinfer.sequence import Sequence
from tests.covering import covered_layouts
from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import recorded_chunks
from tests.engine.workload import NUM_TOKENS, alone, tokens_of, workload

PROMPTS, PARAMS = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (128,)}  # fewer programs to compile
ONE_SIZE = {"decode_buckets": (32,), "prefill_buckets": (128,)}
LAYOUTS = {
    "two devices": {"prefill_devices": (1,), "decode_devices": (0,), **ONE_SIZE},
    "two meshes of two": {"prefill_devices": (0, 1), "decode_devices": (2, 3), **SMALL},
    "one mesh of two": {"prefill_devices": (0, 1), "decode_devices": (0, 1), **SMALL},
    "two stages to a device": {"prefill_devices": (0, 1), "prefill_parallel": "pp=2", "decode_devices": (4,), **SMALL},
    "one device to two": {"prefill_devices": (4,), "decode_devices": (2, 3), **SMALL},
    "two devices to one": {"prefill_devices": (0, 1), "decode_devices": (4,), **SMALL},
    "chunks of 16": {"prefill_chunk_size": 16, "prefill_buckets": (16,), "decode_buckets": (32,)},
    "chunks of 32": {"prefill_chunk_size": 32, "prefill_buckets": (32,)},
    "chunks of 64": {"prefill_chunk_size": 64, "prefill_buckets": (64,)},
    "chunks of 50": {"prefill_chunk_size": 50, "prefill_buckets": (50,), "decode_buckets": (32,)},
    "pages of 4": {"page_size": 4, **SMALL},
    "pages of 32": {"page_size": 32, **SMALL},
    "XLA alone": {"matmul_backend": "xla", "attention_backend": "xla", **SMALL},
    "the reference's attention": {"attention_backend": "reference", **SMALL},
    "no prefix cache": {"prefix_cache": False, **ONE_SIZE},
}


def chosen(names: Iterable[str]) -> list[Any]:
    """Of these layouts as many as have what any of them has; of sizes of chunks only where they end counts."""
    rows = {}
    for name in names:
        settings = dict(LAYOUTS.get(name, {}))
        chunk = settings.pop("prefill_chunk_size", 0)
        sizes = {"max_batch_size", "decode_buckets", "prefill_buckets"} & set(settings)
        chunks = {"chunks": "one page" if chunk == 16 else "end within pages"} if chunk == 16 or chunk % 16 else {}
        rows[name] = {key: value for key, value in settings.items() if key not in sizes} | chunks
    return covered_layouts(rows)


def forget(llm: LLM) -> None:
    """Empty the prefix cache, of which other tests have left something."""
    for manager in (llm.engine._components.prefill.manager, llm.engine._components.decode.manager):
        manager.forget()


def take_steps(engine: Engine, outputs: dict[str, RequestOutput], most: int = 10_000) -> None:
    """So many steps, or as many as there are."""
    while engine.has_work and most:
        most -= 1
        for delta in engine.step():
            outputs[delta.request_id].add(delta)


def test_greedy_tokens_are_the_plain_passes_and_no_close_calls(llm, expected):
    for prompt, params, [tokens] in zip(PROMPTS, PARAMS, expected, strict=True):
        if params.temperature or params != replace(PARAMS[0], logprobs=params.logprobs, max_tokens=params.max_tokens):
            continue
        scores = llm.logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert scores.argmax(-1).tolist() == tokens
        second, first = np.sort(scores, -1)[:, -2:].T
        assert (first - second).min() > 2e-4  # well over what rounding can do, so all tests of equality are fair
        assert len(set(tokens)) > NUM_TOKENS // 3  # nor does it say the same over and over


def test_a_batch_of_32_gives_each_request_what_it_gets_alone(llm):
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 400, int(random.integers(1, 16))).tolist() for _ in range(32)]
    params = [replace(p, max_tokens=15) for p in PARAMS]
    expected = alone(llm, prompts, params)
    engine, most = llm.engine, 0
    outputs = {str(i): RequestOutput.empty(str(i), None, prompt, params[i]) for i, prompt in enumerate(prompts)}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params[i])
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id].add(delta)
        most = max(most, engine.stats.num_running)
    assert tokens_of(outputs.values()) == expected
    assert most == 32


# Short prompts, so that many are let in, and long answers, for which there is no room.
BEGINNINGS, LONGER = [prompt[:15] for prompt in PROMPTS], [replace(p, max_tokens=80) for p in PARAMS]


@pytest.fixture(scope="module")
def longer_answers(llms):
    return alone(llms(), BEGINNINGS, LONGER)


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", ["one device", "two devices", "no prefix cache"])
def test_preemption_changes_nothing(llms, longer_answers, layout):
    of_layout = llms(**LAYOUTS.get(layout, {}))
    preempted = of_layout.engine.stats.num_preemptions
    assert tokens_of(of_layout.generate(BEGINNINGS, LONGER)) == longer_answers
    assert of_layout.engine.stats.num_preemptions - preempted > 10
    assert_all_free(of_layout.engine)


def test_the_order_of_arrival_does_not_matter(llm, expected):
    backwards = tokens_of(llm.generate(PROMPTS[::-1], PARAMS[::-1]))
    assert backwards[::-1] == expected


def test_joining_a_running_batch_changes_nothing(llm, expected):
    engine, outputs = llm.engine, {}
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        outputs[f"join-{number}"] = RequestOutput.empty(f"join-{number}", None, prompt, params)
        engine.add_request(f"join-{number}", prompt, params)
        take_steps(engine, outputs, 3)
    take_steps(engine, outputs)
    assert tokens_of(outputs.values()) == expected
    assert_all_free(engine)


@pytest.mark.parametrize("layout", chosen(LAYOUTS))
def test_every_layout_gives_the_same_tokens(llms, expected, layout):
    llm = llms(**LAYOUTS[layout])
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected
    assert llm.engine.stats.num_compilations_after_ready == 0
    if layout == "no prefix cache":
        assert llm.engine.stats.num_cached_tokens == 0
    if LAYOUTS[layout].get("prefill_devices") != LAYOUTS[layout].get("decode_devices"):
        assert llm.engine.stats.num_pages_moved >= sum(map(len, PROMPTS)) // 16
    assert_all_free(llm.engine)


@pytest.mark.parametrize("layout", ["one device", "two devices"])
def test_sequences_of_one_request_share_its_prompt_and_draw_by_seeds_in_a_row(llms, llm, layout):
    of_layout = llms(**LAYOUTS.get(layout, {}))
    prompts = [PROMPTS[i] for i in (0, 4, 11, 14)]
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=80, n=5, ignore_eos=True)
    singles = [alone(llm, [prompt] * 5, [replace(params, n=1, seed=80 + i) for i in range(5)]) for prompt in prompts]
    forget(of_layout)
    with recorded_chunks(of_layout.engine) as chunks:
        outputs = of_layout.generate(prompts, params)
    assert tokens_of(outputs) == [[tokens for [tokens] in of_prompt] for of_prompt in singles]
    computed: Counter[Sequence] = Counter()
    for chunk in chunks:
        computed[chunk.sequence] += chunk.length
    # The prompt is computed once; that is the request's own doing, not the cache's.
    assert all(num_tokens == (s.num_prompt if s.prefill.leader is None else 0) for s, num_tokens in computed.items())
    assert len(computed) == 5 * len(prompts)
    assert [output.cached_tokens for output in outputs] == [0] * len(prompts)
    assert_all_free(of_layout.engine)


def test_requests_without_a_seed_differ(llm):
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([PROMPTS[3]] * 3, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


# With a prefix cache, whose hits are computed in other chunks and, in part, by decode.

CACHED_LAYOUTS = ["one device", "two devices", "two meshes of two", "one mesh of two", "one device to two", "chunks of 16", "chunks of 50"]
LONG = range(7, 15)  # of PROMPTS, with parameters of every kind
NUM_BEGUN = 12  # tokens of each answer: a step costs what it does, and these tests are about where answers begin
SHORT = [replace(params, max_tokens=NUM_BEGUN) for params in PARAMS]


def whole(num_tokens: int) -> int:
    """Tokens in whole pages."""
    return num_tokens // 16 * 16


@pytest.mark.parametrize("layout", chosen(CACHED_LAYOUTS))
def test_a_hit_changes_no_token(llms, expected, layout):
    llm = llms(**LAYOUTS.get(layout, {}))
    for i in LONG:
        forget(llm)
        first, again = (llm.generate([PROMPTS[i]], SHORT[i])[0] for _ in range(2))
        assert (first.cached_tokens, again.cached_tokens) == (0, whole(len(PROMPTS[i]) - 1))
        assert tokens_of([first, again]) == [[expected[i][0][:NUM_BEGUN]]] * 2
        if PARAMS[i].logprobs is not None:
            [told], [told_again] = ([output.logprobs for output in of_request.outputs] for of_request in (first, again))
            assert [t.logprob for t in told_again] == pytest.approx([t.logprob for t in told], abs=1e-4)
            assert [[token for token, _ in t.top] for t in told_again] == [[token for token, _ in t.top] for t in told]
    assert_all_free(llm.engine)


@pytest.fixture(scope="module")
def second_turns(llms, expected):
    """Prompts of conversations that go on, and their answers without a prefix cache."""
    prompts = [PROMPTS[i] + expected[i][0][:NUM_BEGUN] + PROMPTS[i][:9] for i in LONG]
    return prompts, alone(llms(**LAYOUTS["no prefix cache"]), prompts, [SHORT[i] for i in LONG])


@pytest.mark.parametrize("layout", chosen(CACHED_LAYOUTS))
def test_a_conversation_goes_on_as_if_it_were_computed_anew(llms, second_turns, layout):
    llm = llms(**LAYOUTS.get(layout, {}))
    for i, prompt, tokens in zip(LONG, *second_turns, strict=True):
        forget(llm)
        llm.generate([PROMPTS[i]], SHORT[i])
        output = llm.generate([prompt], SHORT[i])[0]
        assert output.cached_tokens == whole(len(PROMPTS[i]) + NUM_BEGUN - 1), "the answer's tokens too"
        assert tokens_of([output]) == [tokens]
    assert_all_free(llm.engine)


ALIKE = [PROMPTS[12][:70] + prompt[:20] for prompt in PROMPTS[:16]]


@pytest.fixture(scope="module")
def answers_alike(llms):
    """Without a prefix cache."""
    return alone(llms(**LAYOUTS["no prefix cache"]), ALIKE, PARAMS[:16])


@pytest.mark.parametrize("layout", ["one device", "two devices", "chunks of 16"])
def test_requests_that_begin_alike_and_come_one_by_one_get_what_they_get_alone(llms, answers_alike, layout):
    llm = llms(**LAYOUTS.get(layout, {}))
    forget(llm)
    outputs = {}
    for number, (prompt, params) in enumerate(zip(ALIKE, PARAMS, strict=False)):
        outputs[f"{number}"] = RequestOutput.empty(f"{number}", None, prompt, params)
        llm.engine.add_request(f"{number}", prompt, params)
        take_steps(llm.engine, outputs, 2)
    take_steps(llm.engine, outputs)
    assert tokens_of(outputs.values()) == answers_alike
    assert sum(output.cached_tokens == 64 for output in outputs.values()) > 8
    assert_all_free(llm.engine)


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", chosen(["one mesh of two", "two meshes of two"]))
def test_batch_work_that_gave_way_gets_what_it_gets_alone(llms, expected, layout):
    llm = llms(**LAYOUTS[layout])
    outputs = {str(i): RequestOutput.empty(str(i), None, PROMPTS[i], PARAMS[i]) for i in range(12)}
    preempted = llm.engine.stats.num_preemptions
    for i in range(12):
        llm.engine.add_request(str(i), PROMPTS[i], PARAMS[i], RequestContext(priority=20 if i < 8 else 0))
        take_steps(llm.engine, outputs, 10 if i == 7 else 1)
    take_steps(llm.engine, outputs)
    assert tokens_of(outputs.values()) == expected[:12]
    assert llm.engine.stats.num_preemptions - preempted >= 4
    assert_all_free(llm.engine)


@pytest.mark.parametrize("layout", ["one device", "two devices"])
def test_every_sequence_of_a_request_is_the_same_with_a_hit(llms, layout):
    llm = llms(**LAYOUTS.get(layout, {}))
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=80, n=4, ignore_eos=True)
    forget(llm)
    first, again = (llm.generate([PROMPTS[12]], params)[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, whole(len(PROMPTS[12]) - 1))
    assert tokens_of([first]) == tokens_of([again])
    assert len({tuple(tokens) for tokens in tokens_of([again])[0]}) == 4


@pytest.mark.parametrize("layout", ["one device", "two devices", "chunks of 50"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_is_to_be_scored_is_scored_whole_though_it_is_known(llms, llm, layout, n):
    of_layout, prompt = llms(**LAYOUTS.get(layout, {})), PROMPTS[13]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=10, n=n)
    forget(of_layout)
    plain = of_layout.generate([prompt], params)[0]
    scored = of_layout.generate([prompt], replace(params, prompt_logprobs=1))[0]
    assert scored.cached_tokens == 0
    assert tokens_of([scored]) == tokens_of([plain])
    np.testing.assert_allclose([told.logprob for told in scored.prompt_logprobs[1:]], llm.logprobs(prompt)[1:], atol=1e-4)
    assert of_layout.generate([prompt], params)[0].cached_tokens == whole(len(prompt) - 1)
    assert_all_free(of_layout.engine)
