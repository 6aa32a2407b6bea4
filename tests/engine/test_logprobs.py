"""Log-probabilities: what sampling and prefill report is what the plain forward pass says."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.request import RequestOutput, SamplingParams
from tests.engine.test_token_equality import LAYOUTS
from tests.engine.workload import workload

PROMPTS, _ = workload()
LAYOUT_NAMES = ["one device", "two devices", "two meshes of two", "chunks of 16", "chunks of 50"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check(plain: LLM, output: RequestOutput, num_top: int, num_prompt_top: int) -> None:
    prompt = output.prompt_token_ids
    for sequence in output.outputs:
        text = prompt + sequence.token_ids
        expected = log_softmax(plain.logits(text))
        for place, reported in enumerate(sequence.logprobs, len(prompt) - 1):
            assert reported.token_id == text[place + 1]
            check_one(expected[place], reported, num_top)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for place, reported in enumerate(output.prompt_logprobs[1:]):
        assert reported.token_id == prompt[place + 1]
        check_one(expected[place], reported, num_prompt_top)


def check_one(expected: np.ndarray, reported, num_top: int) -> None:
    assert reported.logprob == pytest.approx(expected[reported.token_id], abs=1e-4)
    assert len(reported.top) == num_top
    found = [logprob for _, logprob in reported.top]
    np.testing.assert_allclose(found, np.sort(expected)[::-1][:num_top], atol=1e-4)
    np.testing.assert_allclose(found, expected[[token for token, _ in reported.top]], atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_all_reported_are_the_plain_passes(llms, llm, layout):
    of_layout = llms(**LAYOUTS.get(layout, {}))
    prompts = [PROMPTS[i] for i in (0, 2, 6, 9, 10, 11, 14)]
    params = SamplingParams(
        temperature=1.0, top_k=40, seed=3, max_tokens=12, logprobs=4, prompt_logprobs=2, ignore_eos=True, repetition_penalty=1.2
    )
    for output in of_layout.generate(prompts, params):
        check(llm, output, 4, 2)


def test_llm_logprobs_are_those_reported(llm):
    [output] = llm.generate([PROMPTS[8]], SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, prompt_logprobs=0))
    reported = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    plain = llm.logprobs(PROMPTS[8] + output.outputs[0].token_ids)
    assert np.isnan(plain[0])
    np.testing.assert_allclose([r.logprob for r in reported[1:]], plain[1:], atol=1e-4)
    assert all(r.top == () for r in reported[1:])


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", ["one device", "two devices"])
def test_all_reported_are_the_plain_passes_when_pages_run_out(llms, llm, layout):
    of_layout = llms(**LAYOUTS.get(layout, {}))
    preempted = of_layout.engine.stats.num_preemptions
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=70, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    for output in of_layout.generate([prompt[:20] for prompt in PROMPTS], params):
        check(llm, output, 3, 3)
    assert of_layout.engine.stats.num_preemptions > preempted


def test_every_sequence_of_a_request_has_the_prompts(llm):
    engine, deltas = llm.engine, []
    engine.add_request("several", PROMPTS[14], SamplingParams(n=3, max_tokens=2, prompt_logprobs=1, seed=1))
    while engine.has_work:
        deltas += engine.step()
    told = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert [len(of_sequence) for of_sequence in told] == [len(PROMPTS[14])] * 3
    assert told[0] == told[1] == told[2]
    first = {index: next(d for d in deltas if d.index == index) for index in range(3)}
    assert all(d.prompt_logprobs is not None for d in first.values())


def test_scoring_a_prompt_needs_no_token(llm):
    prompt = PROMPTS[11]
    [output] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=5))
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"
    plain = log_softmax(llm.logits(prompt))
    for place, reported in enumerate(output.prompt_logprobs[1:]):
        check_one(plain[place], reported, 5)


def test_logits_are_refused_for_what_the_model_cannot_hold(llm):
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.logits([])
    with pytest.raises(ValueError, match="token id 512"):
        llm.logprobs([1, 512])
    with pytest.raises(ValueError, match="at most 512 fit"):
        llm.logits([1] * 513)
    assert llm.logits([1] * 512).shape == (512, 512)
