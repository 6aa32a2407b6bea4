"""Each family served from a small checkpoint: logits and greedy tokens are those that the reference wrote to tests/golden/family_logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import RequestOutput
from tests.families import checkpoint
from tests.golden import read
from tests.golden.family_logits.read import MIN_KINDS, MIN_MARGIN, NAMES, NUM_TOKENS, load

# Prompts of up to 70 tokens and 32 more, in chunks of 32 and pages of 8.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_memory": "2MiB",
    "page_size": 8,
    "max_model_len": 256,
    "prefill_buckets": (32,),
    "prefill_chunk_size": 32,
    "max_batch_size": 4,
    "decode_buckets": (4,),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=8)
PADDED = 128  # tokens of every plain forward pass, so that one program serves all; what comes later changes nothing


@dataclass(frozen=True)
class Family:
    llm: LLM
    goldens: list[read.GoldenPrompt]


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    name = request.param
    folder = checkpoint.write(tmp_path_factory.mktemp(name), checkpoint.config_of(name), checkpoint.shapes_of(name))
    yield Family(LLM(str(folder), **SETTINGS), load(name))


def test_logits_of_the_plain_pass_are_the_references(family: Family) -> None:
    for golden in family.goldens:
        ids = golden.prompt_ids + golden.tokens[:-1]
        logits = family.llm.logits(ids + [0] * (PADDED - len(ids)))[: len(ids)]
        assert golden.prefill.difference(logits[golden.prefill_positions]) < read.MAX_LOGIT_DIFFERENCE, golden.name
        assert golden.steps.difference(logits[len(golden.prompt_ids) - 1 :]) < read.MAX_LOGIT_DIFFERENCE, golden.name


def test_prompts_of_unequal_lengths_are_continued_together_as_the_reference_does_alone(family: Family) -> None:
    outputs = family.llm.generate([golden.prompt_ids for golden in family.goldens], GREEDY)
    for golden, output in zip(family.goldens, outputs, strict=True):
        check_continuation(golden, output)


def test_a_conversation_goes_on_from_the_pages_of_its_beginning(family: Family) -> None:
    golden, num_answered = family.goldens[-1], 20
    family.llm.generate([golden.prompt_ids], replace(GREEDY, max_tokens=num_answered))
    (output,) = family.llm.generate([golden.prompt_ids + golden.tokens[:num_answered]], GREEDY)
    assert output.cached_tokens > len(golden.prompt_ids)
    check_continuation(golden, output, num_answered)


def check_continuation(golden: read.GoldenPrompt, output: RequestOutput, start: int = 0) -> None:
    """Of all steps from `start` on: the reference's token, and its log-probabilities of the best."""
    (answer,) = output.outputs
    assert answer.token_ids[: NUM_TOKENS - start] == golden.tokens[start:], golden.name
    assert answer.logprobs is not None
    expected = golden.steps.best_logits - golden.steps.logsumexp[:, None]
    for step in range(start, NUM_TOKENS):
        found = [logprob for _, logprob in answer.logprobs[step - start].top]
        np.testing.assert_allclose(found, expected[step], atol=read.MAX_LOGIT_DIFFERENCE)


@pytest.mark.parametrize("name", NAMES)
def test_the_references_choices_are_clear_and_many(name: str) -> None:
    """Rounding could choose no other tokens, and a model that saw nothing of its context would not choose these."""
    goldens = load(name)
    assert [len(golden.tokens) for golden in goldens] == [NUM_TOKENS] * len(goldens)
    assert all(golden.steps.margins.min() > MIN_MARGIN for golden in goldens)
    assert all(len(set(golden.tokens)) >= MIN_KINDS for golden in goldens)
