"""A family's small checkpoint behind an LLM, and what its answers are held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import RequestOutput
from tests.families import checkpoint
from tests.golden import read
from tests.golden.family_logits.read import NUM_TOKENS

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


def serve(folder: Path, family: str, **settings: Any) -> LLM:
    """Over its checkpoint, written to the folder."""
    checkpoint.write(folder, checkpoint.config_of(family), checkpoint.shapes_of(family))
    return LLM(str(folder), **SETTINGS | settings)


def plain_logits(llm: LLM, token_ids: list[int]) -> np.ndarray:
    """Of the plain forward pass."""
    return llm.logits(token_ids + [0] * (PADDED - len(token_ids)))[: len(token_ids)]


def check_continuation(golden: read.GoldenPrompt, output: RequestOutput, start: int = 0) -> None:
    """Of all steps from `start` on: the reference's token, and its log-probabilities of the best."""
    (answer,) = output.outputs
    assert answer.token_ids[: NUM_TOKENS - start] == golden.tokens[start:], golden.name
    assert answer.logprobs is not None
    expected = golden.steps.best_logits - golden.steps.logsumexp[:, None]
    for step in range(start, NUM_TOKENS):
        found = [logprob for _, logprob in answer.logprobs[step - start].top]
        np.testing.assert_allclose(found, expected[step], atol=read.MAX_LOGIT_DIFFERENCE)
