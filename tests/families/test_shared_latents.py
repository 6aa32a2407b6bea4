"""A model with latents on devices that share them out: one device's tokens, with hits, preemption and tiers, in more context for the same memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests.engine.page_audit import assert_all_free
from tests.engine.workload import tokens_of
from tests.families import checkpoint

LATENT_BYTES = 3 * 32 * 4  # of a token in three layers
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "prefill_buckets": (32,),
    "prefill_chunk_size": 32,
    "max_batch_size": 8,
    "decode_buckets": (8,),
    "page_size": 16,
    "kv_memory": str(19 * 16 * LATENT_BYTES),  # for a request at its longest and little more
}
# Pages of so many tokens, of which each device has 8 or more: as many pages in all, each device with its part.
LAYOUTS: dict[str, dict[str, Any]] = {
    "two": {"prefill_devices": (0, 1), "decode_devices": (0, 1), "kv_memory": str(20 * 8 * LATENT_BYTES)},
    "four to two": {"prefill_parallel": "tp=4", "decode_parallel": "tp=2", "page_size": 32, "kv_memory": str(10 * 16 * LATENT_BYTES)},
}
LATENTS = {
    "two": {"shared": "shared out over 2 devices, in pages of 16 tokens"},
    "four to two": {f"{role}": f"shared out over {n} devices, in pages of 32 tokens" for role, n in (("prefill", 4), ("decode", 2))},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
# Prompts of one begin, so that the prefix cache is of use, and more of them than there is room for.
PROMPTS = [[*range(7, 7 + 33), *np.random.default_rng(90 + i).integers(0, 400, 1 + 5 * i).tolist()] for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    checkpoint.write(made, checkpoint.config_of("deepseek_v3"), checkpoint.shapes_of("deepseek_v3"))
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    llm = LLM(str(folder), **SETTINGS | {"kv_memory": "4MiB"})
    found = tokens_of(llm.generate(PROMPTS, GREEDY))
    assert llm.engine.stats.num_preemptions == 0 and not llm.engine.stats.latents
    for prompt, [tokens] in zip(PROMPTS, found, strict=True):
        second, first = np.sort(llm.logits(prompt + tokens)[len(prompt) - 1 : -1], -1)[:, -2:].T
        assert (first - second).min() > 2e-4  # rounding chooses no other
    return found


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", [pytest.param("two", marks=pytest.mark.exhaustive), "four to two"])
def test_tokens_are_one_devices_with_hits_and_preemption(folder: Path, expected: list[Any], layout: str) -> None:
    llm = LLM(str(folder), **SETTINGS | LAYOUTS[layout])
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
    assert tokens_of(llm.generate(PROMPTS[-2:], GREEDY)) == expected[-2:]  # of which much is cached
    siblings = llm.generate(PROMPTS[-1], replace(GREEDY, n=2, max_tokens=9))  # which start from copies of its last page
    assert len(PROMPTS[-1]) % 16 and tokens_of(siblings) == [[expected[-1][0][:9]] * 2]
    stats = llm.engine.stats
    assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0
    assert stats.num_compilations_after_ready == 0
    assert stats.latents == LATENTS[layout]
    page_size, num_devices = (16, 2) if layout == "two" else (32, 2)  # where tokens are decoded
    name = "shared KV pages" if layout == "two" else "decode KV pages"
    assert stats.memory[name] * num_devices == (stats.decode_pages + 1) * page_size * LATENT_BYTES
    assert_all_free(llm.engine)


@pytest.mark.exhaustive  # tests/parallel/test_heads_on_meshes.py has pages of heads
def test_pages_on_disk_are_of_use_to_another_mesh(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    tiers = {"kv_host_memory": "4MiB", "kv_disk": f"{tmp_path / 'kv'}:4MiB", "page_size": 16}
    restored = []
    for layout in ({}, LAYOUTS["two"]):
        with LLM(str(folder), **SETTINGS | layout | tiers) as llm:
            llm.engine._components.prefill.tiers._seconds_to_compute = lambda num_tokens: float("inf")  # whatever there is, is fetched
            assert tokens_of(llm.generate(PROMPTS[-2:], GREEDY)) == expected[-2:]
            restored.append(llm.engine.stats.num_restored_tokens)
    assert restored[0] == 0 and restored[1] >= len(PROMPTS[-1]) // 16 * 16
