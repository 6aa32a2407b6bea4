"""Parity with the reference implementation, from what it wrote to tests/golden (`make golden`): no torch needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import RequestOutput
from tests.golden import read

GOLDEN = read.load()
NUM_TOKENS = len(GOLDEN[0].tokens)
PADDED = 128  # tokens: of the plain pass a few programs serve all; what comes later changes nothing
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

# Every other one, and the long one, which is the last: they fill a batch. The others before a release.
IN_CORE = [golden for number, golden in enumerate(GOLDEN) if number % 2 == 0 or golden is GOLDEN[-1]]
OTHERS = GOLDEN[1:-1:2]
Outputs = dict[str, RequestOutput]  # by the prompt's name


def cases(*, has_long: bool = True) -> list[Any]:
    names = {golden.name for golden in (IN_CORE if has_long else IN_CORE[:-1])}
    return [pytest.param(golden, id=golden.name, marks=() if golden.name in names else pytest.mark.exhaustive) for golden in GOLDEN]


def continued(llm: LLM, goldens: list[read.GoldenPrompt], params: SamplingParams) -> Outputs:
    outputs = llm.generate([golden.prompt_ids for golden in goldens], params)
    return {golden.name: output for golden, output in zip(goldens, outputs, strict=True)}


@pytest.fixture(scope="module")
def outputs(default_llm: LLM) -> Outputs:
    """Continued greedily in one running batch, the long one in chunks."""
    return continued(default_llm, IN_CORE, GREEDY)


@pytest.fixture(scope="module")
def other_outputs(default_llm: LLM) -> Outputs:
    return continued(default_llm, OTHERS, GREEDY)


@pytest.fixture(scope="module")
def outputs_with_logprobs(default_llm: LLM) -> Outputs:
    """Of eight, with log-probabilities: then the programs take the way over all logits."""
    return continued(default_llm, IN_CORE[:8], replace(GREEDY, logprobs=8))


def test_there_are_enough_prompts_of_every_kind() -> None:
    lengths = [len(golden.prompt_ids) for golden in GOLDEN]
    assert len(GOLDEN) >= 24
    assert min(lengths) == 1
    assert max(lengths) > 1000
    assert NUM_TOKENS == 48


@pytest.mark.parametrize("golden", cases(has_long=False))
def test_logits_of_the_plain_pass_are_the_references(default_llm: LLM, golden: read.GoldenPrompt) -> None:
    tokens = golden.prompt_ids + golden.tokens[:-1]
    logits = default_llm.logits(tokens + [0] * (-len(tokens) % PADDED))[: len(tokens)]
    assert golden.prefill.difference(logits[golden.prefill_positions]) < read.MAX_LOGIT_DIFFERENCE
    assert golden.steps.difference(logits[len(golden.prompt_ids) - 1 :]) < read.MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("golden", cases())
def test_greedy_tokens_are_the_references(request: pytest.FixtureRequest, golden: read.GoldenPrompt) -> None:
    outputs: Outputs = request.getfixturevalue("outputs" if any(golden is of_core for of_core in IN_CORE) else "other_outputs")
    tokens = outputs[golden.name].outputs[0].token_ids
    assert len(tokens) == NUM_TOKENS
    assert read.first_difference(tokens, golden.tokens, golden.steps.margins) is None, (tokens, golden.tokens)


@pytest.mark.parametrize("golden", IN_CORE[:8], ids=[golden.name for golden in IN_CORE[:8]])
def test_log_probabilities_of_each_step_are_the_references(outputs_with_logprobs: Outputs, golden: read.GoldenPrompt) -> None:
    output = outputs_with_logprobs[golden.name].outputs[0]
    expected = golden.steps.best_logits - golden.steps.logsumexp[:, None]
    assert output.logprobs is not None
    for step, (token, reported) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        if token != golden.tokens[step]:
            break  # after a close call the texts may differ: the test above holds where
        # Of equally likely alternatives the ids may swap places; the probabilities may not.
        np.testing.assert_allclose([logprob for _, logprob in reported.top], expected[step], atol=read.MAX_LOGIT_DIFFERENCE)
        assert abs(reported.logprob - expected[step, 0]) < read.MAX_LOGIT_DIFFERENCE


def test_a_close_call_excuses_what_comes_after_it_and_nothing_before() -> None:
    wide, close = 1.0, read.CLOSE_CALL / 2
    assert read.first_difference([1, 2, 3], [1, 2, 3], np.array([wide, wide, wide])) is None
    assert read.first_difference([1, 9, 3], [1, 2, 3], np.array([wide, wide, close])) == 1
    assert read.first_difference([1, 9, 8], [1, 2, 3], np.array([wide, close, wide])) is None
    assert read.first_difference([1, 2, 8], [1, 2, 3], np.array([wide, wide, wide])) == 2
