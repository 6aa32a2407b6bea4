"""Parity with the reference implementation, from what it wrote to tests/golden (`make golden`): no torch needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import RequestOutput
from tests.golden import read

GOLDEN = read.load()
NUM_TOKENS = len(GOLDEN[0].tokens)
PADDED = 128  # tokens: of the plain pass a few programs serve all; what comes later changes nothing
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def outputs(default_llm: LLM) -> list[RequestOutput]:
    """All golden prompts continued greedily in one running batch, the long one in chunks."""
    return default_llm.generate([golden.prompt_ids for golden in GOLDEN], GREEDY)


@pytest.fixture(scope="module")
def outputs_with_logprobs(default_llm: LLM) -> list[RequestOutput]:
    """The same for the first eight, with log-probabilities: then the programs take the way over all logits."""
    return default_llm.generate([golden.prompt_ids for golden in GOLDEN[:8]], replace(GREEDY, logprobs=8))


def test_there_are_enough_prompts_of_every_kind() -> None:
    lengths = [len(golden.prompt_ids) for golden in GOLDEN]
    assert len(GOLDEN) >= 24
    assert min(lengths) == 1
    assert max(lengths) > 1000
    assert NUM_TOKENS == 48


@pytest.mark.parametrize(
    "golden",
    [pytest.param(golden, id=golden.name, marks=pytest.mark.exhaustive if len(golden.prompt_ids) > 1000 else ()) for golden in GOLDEN],
)
def test_logits_of_the_plain_pass_are_the_references(default_llm: LLM, golden: read.GoldenPrompt) -> None:
    tokens = golden.prompt_ids + golden.tokens[:-1]
    logits = default_llm.logits(tokens + [0] * (-len(tokens) % PADDED))[: len(tokens)]
    assert golden.prefill.difference(logits[golden.prefill_positions]) < read.MAX_LOGIT_DIFFERENCE
    assert golden.steps.difference(logits[len(golden.prompt_ids) - 1 :]) < read.MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("number", range(len(GOLDEN)), ids=[golden.name for golden in GOLDEN])
def test_greedy_tokens_are_the_references(outputs: list[RequestOutput], number: int) -> None:
    golden, tokens = GOLDEN[number], outputs[number].outputs[0].token_ids
    assert len(tokens) == NUM_TOKENS
    assert read.first_difference(tokens, golden.tokens, golden.steps.margins) is None, (tokens, golden.tokens)


@pytest.mark.parametrize("number", range(8), ids=[golden.name for golden in GOLDEN[:8]])
def test_log_probabilities_of_each_step_are_the_references(outputs_with_logprobs: list[RequestOutput], number: int) -> None:
    golden, output = GOLDEN[number], outputs_with_logprobs[number].outputs[0]
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
