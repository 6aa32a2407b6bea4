"""Families of every kind on several devices, and with their matrices in other forms: the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.serving import GREEDY, check_continuation, plain_logits, serve
from tests.golden.family_logits.read import load
from tests.golden.read import MAX_LOGIT_DIFFERENCE

LAYOUTS: dict[str, dict[str, Any]] = {
    "two meshes": {"prefill_devices": (0,), "decode_devices": (1,)},
    "two devices each": {"prefill_devices": (0, 1), "decode_devices": (2, 3)},
    "pipelines": {"prefill_parallel": "tp=2,pp=2", "decode_parallel": "tp=1,pp=2"},
    "a pipeline for both": {"prefill_parallel": "tp=1,pp=3"},
    "plain matrices": {"matmul_backend": "xla"},
    "latents shared out": {"prefill_devices": (0, 1), "decode_devices": (2, 3, 4, 5), "page_size": 32},
    "latents shared out, then whole": {"prefill_parallel": "tp=4", "decode_parallel": "tp=1,pp=2", "page_size": 32},
    "latents shared out by stages": {"prefill_parallel": "tp=1,pp=2", "decode_parallel": "tp=2,pp=2", "page_size": 16},
    "experts dealt out": {"prefill_parallel": "tp=2,ep=2", "decode_parallel": "tp=4,ep=4"},
    "experts dealt out in pipelines": {"prefill_parallel": "tp=2,pp=2,ep=2", "decode_parallel": "tp=1,pp=2"},
    "tokens split": {"prefill_parallel": "tp=2", "sequence_parallel": "on"},
    "tokens split in pipelines": {"prefill_parallel": "tp=2,pp=2", "sequence_parallel": "on"},
    "tokens split, experts dealt out": {"prefill_parallel": "tp=2,ep=2", "sequence_parallel": "on"},
}
# Windows or chunks beside global layers, latents, experts, norms after sums, over heads of both devices, and biases.
CASES = (
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
)
# Experts are bfloat16 beside integers: what differs by float32's rounding is rounded otherwise there.
INTEGERS = {"deepseek_v3": 3e-2, "gemma_3": MAX_LOGIT_DIFFERENCE, "llama_4": 1e-2, "qwen3_moe": 1e-2}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_tokens_are_the_references_in_every_layout(tmp_path: Path, family: str, layout: str) -> None:
    llm, goldens = serve(tmp_path, family, **LAYOUTS[layout]), load(family)
    for golden, output in zip(goldens, llm.generate([golden.prompt_ids for golden in goldens], GREEDY), strict=True):
        check_continuation(golden, output)
    assert llm.engine.stats.num_compilations_after_ready == 0


@pytest.mark.parametrize(("family", "tolerance"), INTEGERS.items())
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
