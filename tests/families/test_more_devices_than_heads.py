"""Families of every kind on more devices than they have KV heads, or heads: the references' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families.serving import GREEDY, check_continuation, serve
from tests.golden.family_logits.read import load

COPIES = "KV heads 2 -> 4, 2 copies of each, over 4 devices: 100% more KV, {}% more attention weights"
# By family: norms over all heads as one, beside copies and heads of zeros; biases; latents; norms of each head and windows; a single KV head.
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "olmo2": (
        {"prefill_parallel": "tp=8"},
        {"shared": "KV heads 2 -> 8, 2 copies of each, over 8 devices: 300% more KV, 167% more attention weights"},
    ),
    "qwen2": ({"prefill_parallel": "tp=1,pp=2", "decode_parallel": "tp=4"}, {"decode": COPIES.format(50)}),
    "kimi_k25": ({"prefill_parallel": "tp=4"}, {"shared": "heads 2 -> 4 over 4 devices: 100% more weights of heads"}),
    "gemma_3": ({"prefill_parallel": "tp=4", "decode_parallel": "tp=2,pp=2"}, {"prefill": COPIES.format(33)}),
    "llama_4_with_images": (
        {"prefill_parallel": "tp=8"},
        {"shared": "KV heads 1 -> 8, 4 copies of each, over 8 devices: 700% more KV, 220% more attention weights"},
    ),
}


@pytest.mark.parametrize("family", CASES)
def test_tokens_are_the_references(tmp_path: Path, family: str) -> None:
    layout, costs = CASES[family]
    llm, goldens = serve(tmp_path, family, **layout), load(family)
    for golden, output in zip(goldens, llm.generate([golden.prompt_ids for golden in goldens], GREEDY), strict=True):
        check_continuation(golden, output)
    assert llm.engine.stats.heads == costs
    assert llm.engine.stats.num_compilations_after_ready == 0
