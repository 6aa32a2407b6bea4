"""Each family served from a small checkpoint: logits and greedy tokens are those that the reference wrote to tests/golden/family_logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from jaxinfer import LLM
from tests.families.serving import GREEDY, check_continuation, plain_logits, serve
from tests.golden import read
from tests.golden.family_logits.read import MIN_KINDS, MIN_MARGIN, NAMES, NUM_TOKENS, load


@dataclass(frozen=True)
class Family:
    llm: LLM
    goldens: list[read.GoldenPrompt]


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    yield Family(serve(tmp_path_factory.mktemp("family"), request.param), load(request.param))


def test_logits_of_the_plain_pass_are_the_references(family: Family) -> None:
    for golden in family.goldens:
        logits = plain_logits(family.llm, golden.prompt_ids + golden.tokens[:-1])
        assert golden.prefill.difference(logits[golden.prefill_positions]) < read.MAX_LOGIT_DIFFERENCE, golden.name
        assert golden.steps.difference(logits[len(golden.prompt_ids) - 1 :]) < read.MAX_LOGIT_DIFFERENCE, golden.name


def test_prompts_of_unequal_lengths_are_continued_together_as_the_reference_does_alone(family: Family) -> None:
    outputs = family.llm.generate([golden.prompt_ids for golden in family.goldens], GREEDY)
    for golden, output in zip(family.goldens, outputs, strict=True):
        check_continuation(golden, output)


def test_without_log_probabilities_the_tokens_are_the_same(family: Family) -> None:
    outputs = family.llm.generate([golden.prompt_ids for golden in family.goldens], replace(GREEDY, logprobs=None))
    assert [output.outputs[0].token_ids for output in outputs] == [golden.tokens for golden in family.goldens]


def test_a_conversation_goes_on_from_the_pages_of_its_beginning(family: Family) -> None:
    golden, num_answered = family.goldens[-1], 20
    family.llm.generate([golden.prompt_ids], replace(GREEDY, max_tokens=num_answered))
    (output,) = family.llm.generate([golden.prompt_ids + golden.tokens[:num_answered]], GREEDY)
    assert output.cached_tokens > len(golden.prompt_ids)
    check_continuation(golden, output, num_answered)


@pytest.mark.parametrize("name", NAMES)
def test_the_references_choices_are_clear_and_many(name: str) -> None:
    """Rounding could choose no other tokens, and a model that saw nothing of its context would not choose these."""
    goldens = load(name)
    assert [len(golden.tokens) for golden in goldens] == [NUM_TOKENS] * len(goldens)
    assert all(golden.steps.margins.min() > MIN_MARGIN for golden in goldens)
    assert all(len(set(golden.tokens)) >= MIN_KINDS for golden in goldens)
