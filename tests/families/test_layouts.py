"""Each family served from a small checkpoint, on one device and on several: logits and greedy tokens are those that the reference
wrote to tests/golden/family_logits."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM
from tests.covering import axes_of_layout, cover
from tests.families.serving import GREEDY, check_continuation, plain_logits, serve
from tests.golden import read
from tests.golden.family_logits.read import MIN_KINDS, MIN_MARGIN, NAMES, NUM_TOKENS, load

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "plain matrices": {"matmul_backend": "xla"},
    "two meshes": {"prefill_devices": (0,), "decode_devices": (1,)},
    "two devices each": {"prefill_devices": (0, 1), "decode_devices": (2, 3)},
    "pipelines": {"prefill_parallel": "tp=2,pp=2", "decode_parallel": "tp=1,pp=2"},
    "a pipeline for both": {"prefill_parallel": "tp=1,pp=3"},
    "latents shared out": {"prefill_devices": (0, 1), "decode_devices": (2, 3, 4, 5), "page_size": 32},
    "latents shared out, then whole": {"prefill_parallel": "tp=4", "decode_parallel": "tp=1,pp=2", "page_size": 32},
    "latents shared out by stages": {"prefill_parallel": "tp=1,pp=2", "decode_parallel": "tp=2,pp=2", "page_size": 16},
    "experts dealt out": {"prefill_parallel": "tp=2,ep=2", "decode_parallel": "tp=4,ep=4"},
    "experts dealt out in pipelines": {"prefill_parallel": "tp=2,pp=2,ep=2", "decode_parallel": "tp=1,pp=2"},
    "tokens split": {"prefill_parallel": "tp=2", "sequence_parallel": "on"},
    "tokens split in pipelines": {"prefill_parallel": "tp=2,pp=2", "sequence_parallel": "on"},
    "tokens split, experts dealt out": {"prefill_parallel": "tp=2,ep=2", "sequence_parallel": "on"},
    "four devices": {"prefill_parallel": "tp=4"},
    "eight devices": {"prefill_parallel": "tp=8"},
    "stages, then four devices": {"prefill_parallel": "tp=1,pp=2", "decode_parallel": "tp=4"},
    "four devices, then stages": {"prefill_parallel": "tp=4", "decode_parallel": "tp=2,pp=2"},
}
# Windows or chunks beside global layers, latents, experts, norms after sums, over heads of both devices, and biases.
CASES = (
    *((family, "one device") for family in NAMES),
    ("deepseek_v3", "two devices each"),
    ("deepseek_v3", "pipelines"),
    ("deepseek_v3", "a pipeline for both"),
    ("deepseek_v3", "experts dealt out"),
    ("deepseek_v3", "latents shared out"),
    ("deepseek_v3", "latents shared out, then whole"),
    ("deepseek_v3", "latents shared out by stages"),
    ("gemma_3", "two meshes"),
    ("gemma_3", "two devices each"),
    ("gemma_3", "pipelines"),
    ("gemma_3", "a pipeline for both"),
    ("llama_4", "two devices each"),
    ("llama_4", "pipelines"),
    ("llama_4", "experts dealt out"),
    ("olmo2", "two devices each"),
    ("qwen3_moe", "two devices each"),
    ("qwen3_moe", "experts dealt out"),
    ("qwen3_moe", "experts dealt out in pipelines"),
    ("qwen3_moe", "plain matrices"),
    ("deepseek_v3", "tokens split"),
    ("gemma_3", "tokens split in pipelines"),
    ("llama_4", "tokens split"),
    ("olmo2", "tokens split"),
    ("qwen2", "tokens split"),
    ("qwen3_moe", "tokens split, experts dealt out"),
    # On more devices than there are KV heads, or heads.
    ("olmo2", "eight devices"),
    ("qwen2", "stages, then four devices"),
    ("kimi_k25", "four devices"),
    ("gemma_3", "four devices, then stages"),
    ("llama_4_with_images", "eight devices"),
)
_COPIES = "KV heads 2 -> 4, 2 copies of each, over 4 devices: 100% more KV, {}% more attention weights"
# What devices hold twice there: norms over all heads as one, beside copies and heads of zeros; biases; latents; norms of each head
# and windows; a single KV head.
HEADS: dict[tuple[str, str], dict[str, str]] = {
    ("olmo2", "eight devices"): {"shared": "KV heads 2 -> 8, 2 copies of each, over 8 devices: 300% more KV, 167% more attention weights"},
    ("qwen2", "stages, then four devices"): {"decode": _COPIES.format(50)},
    ("kimi_k25", "four devices"): {"shared": "heads 2 -> 4 over 4 devices: 100% more weights of heads"},
    ("gemma_3", "four devices, then stages"): {"prefill": _COPIES.format(33)},
    ("llama_4_with_images", "eight devices"): {
        "shared": "KV heads 1 -> 8, 4 copies of each, over 8 devices: 700% more KV, 220% more attention weights"
    },
}
# Experts are bfloat16 beside integers: what differs by float32's rounding is rounded otherwise there.
INTEGERS = {"deepseek_v3": 3e-2, "gemma_3": read.MAX_LOGIT_DIFFERENCE, "llama_4": 1e-2, "qwen3_moe": 1e-2}


def covered(family: str, layout: str) -> set[Hashable]:
    """What `make test` has at least once: each family, each two axes of a layout, and copies of heads."""
    axes = {axis.partition("=")[0] for axis in axes_of_layout(LAYOUTS[layout]) if not axis.startswith("page_size")}
    pairs = itertools.combinations_with_replacement(sorted(axes), 2)
    return {family, *pairs, *(["more devices than heads"] if (family, layout) in HEADS else [])}


_CORE = set(cover([covered(*case) for case in CASES]))
PARAMS = [pytest.param(case, id="-".join(case), marks=() if index in _CORE else pytest.mark.exhaustive) for index, case in enumerate(CASES)]


@dataclass(frozen=True)
class Served:
    family: str
    layout: str
    llm: LLM
    goldens: list[read.GoldenPrompt]


@pytest.fixture(scope="module", params=PARAMS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, layout = request.param
    yield Served(family, layout, serve(tmp_path_factory.mktemp("family"), family, **LAYOUTS[layout]), load(family))


def test_prompts_of_unequal_lengths_are_continued_together_as_the_reference_does_alone(served: Served) -> None:
    outputs = served.llm.generate([golden.prompt_ids for golden in served.goldens], GREEDY)
    for golden, output in zip(served.goldens, outputs, strict=True):
        check_continuation(golden, output)
    assert served.llm.engine.stats.heads == HEADS.get((served.family, served.layout), {})
    assert served.llm.engine.stats.num_compilations_after_ready == 0


def test_without_log_probabilities_the_tokens_are_the_same(served: Served) -> None:
    outputs = served.llm.generate([golden.prompt_ids for golden in served.goldens], replace(GREEDY, logprobs=None))
    assert [output.outputs[0].token_ids for output in outputs] == [golden.tokens for golden in served.goldens]


def test_a_conversation_goes_on_from_the_pages_of_its_beginning(served: Served) -> None:
    golden, num_answered = served.goldens[-1], 20
    served.llm.generate([golden.prompt_ids], replace(GREEDY, max_tokens=num_answered))
    (output,) = served.llm.generate([golden.prompt_ids + golden.tokens[:num_answered]], GREEDY)
    page_size = LAYOUTS[served.layout].get("page_size", 8)
    assert output.cached_tokens >= (len(golden.prompt_ids) + num_answered - 1) // page_size * page_size > 0
    check_continuation(golden, output, num_answered)


def test_logits_of_the_plain_pass_are_the_references(served: Served) -> None:
    for golden in served.goldens:
        logits = plain_logits(served.llm, golden.prompt_ids + golden.tokens[:-1])
        assert golden.prefill.difference(logits[golden.prefill_positions]) < read.MAX_LOGIT_DIFFERENCE, golden.name
        assert golden.steps.difference(logits[len(golden.prompt_ids) - 1 :]) < read.MAX_LOGIT_DIFFERENCE, golden.name


@pytest.mark.parametrize(
    ("family", "tolerance"),
    [pytest.param(*case, marks=() if case[0] == "deepseek_v3" else pytest.mark.exhaustive) for case in INTEGERS.items()],
)
def test_of_8_bit_integers_each_step_is_the_plain_pass_and_near_the_references(tmp_path: Path, family: str, tolerance: float) -> None:
    llm, off = serve(tmp_path, family, weights="int8"), []
    for golden in load(family):
        (output,) = llm.generate([golden.prompt_ids], GREEDY)
        (answer,) = output.outputs
        logits = plain_logits(llm, golden.prompt_ids + answer.token_ids)[len(golden.prompt_ids) - 1 : -1].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        assert answer.logprobs is not None
        reported = [one.logprob for one in answer.logprobs]
        np.testing.assert_allclose(reported, logprobs[np.arange(len(reported)), answer.token_ids], atol=tolerance)
        of_prompt = plain_logits(llm, golden.prompt_ids)[golden.prefill_positions]
        off.append(np.abs(of_prompt[:, golden.prefill.vocab_ids] - golden.prefill.logits).mean() / golden.prefill.logits.std())
    assert max(off) < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_the_references_choices_are_clear_and_many(name: str) -> None:
    """Rounding could choose no other tokens, and a model that saw nothing of its context would not choose these."""
    goldens = load(name)
    assert [len(golden.tokens) for golden in goldens] == [NUM_TOKENS] * len(goldens)
    assert all(golden.steps.margins.min() > MIN_MARGIN for golden in goldens)
    assert all(len(set(golden.tokens)) >= MIN_KINDS for golden in goldens)
