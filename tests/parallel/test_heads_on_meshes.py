"""A model with three KV heads on two, four and eight devices, and between meshes with other heads: one device's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import parse_bytes
from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from tests import tiny_model
from tests.conftest import TINY
from tests.covering import axes_of_layout, covered
from tests.engine.page_audit import assert_all_free
from tests.engine.workload import tokens_of
from tests.golden import read

SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (128,)}
PLAIN = {"matmul_backend": "xla", "attention_backend": "xla"}
FOUR = (0, 1, 2, 3)
# With room for a few requests at once: of four and eight devices each has one KV head of a page, of two each has two, one has three.
LAYOUTS: dict[str, dict[str, Any]] = {
    "two": {"prefill_devices": (0, 1), "decode_devices": (0, 1), "kv_memory": "192KiB"},
    "eight": {"prefill_devices": tuple(range(8)), "decode_devices": tuple(range(8)), "kv_memory": "96KiB"},
    "one to four": {"prefill_devices": (4,), "decode_devices": FOUR, "kv_memory": "120KiB"},
    "four to two": {"prefill_devices": FOUR, "decode_devices": (4, 5), "kv_memory": "192KiB"},
    "four to two, plain": {"prefill_devices": FOUR, "decode_devices": (4, 5), "kv_memory": "192KiB", **PLAIN},
    "two to four, integers": {"prefill_devices": (0, 1), "decode_devices": (4, 5, 6, 7), "kv_memory": "96KiB", "weights": "int8"},
}
TWO_OR_FOUR = "KV heads 3 -> 4 over {} devices: 33% more KV, 33% more attention weights"
COSTS = {
    "eight": {"shared": "KV heads 3 -> 8, 2 copies of each, over 8 devices: 167% more KV, 100% more attention weights"},
    "one to four": {"decode": TWO_OR_FOUR.format(4)},
    "four to two": {"prefill": TWO_OR_FOUR.format(4), "decode": TWO_OR_FOUR.format(2)},
}
HEAD_BYTES = 2 * tiny_model.LAYERS * 16 * tiny_model.HEAD * 4  # of a page of 16 tokens
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# Prompts of one begin, so that the prefix cache is of use, and more of them than there is room for.
PROMPTS = [[*range(7, 7 + 33), *np.random.default_rng(140 + i).integers(0, 400, 1 + 5 * i).tolist()] for i in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "attention_bias": True}
    return tiny_model.write(tmp_path_factory.mktemp("models") / "three", **heads)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], list[Any]]:
    """By what weights are kept as."""

    @cache
    def tokens(weights: str) -> list[Any]:
        llm = LLM(str(folder), **TINY | SMALL | {"kv_memory": "4MiB"}, weights=weights)
        found = tokens_of(llm.generate(PROMPTS, GREEDY))
        assert llm.engine.stats.num_preemptions == 0
        for prompt, [answer] in zip(PROMPTS, found, strict=True):
            second, first = np.sort(llm.logits(prompt + answer)[len(prompt) - 1 : -1], -1)[:, -2:].T
            assert (first - second).min() > {"auto": 2e-4, "int8": 4e-3}[weights]  # rounding chooses no other
        return found

    return tokens


def covered_axes(layout: str) -> set[str]:
    """Whatever the degrees are, and sizes of pools; and whether heads are copied."""
    axes = {axis.partition("=")[0] for axis in axes_of_layout(LAYOUTS[layout])} - {"kv_memory"}
    return axes | ({"copies"} if "copies" in "".join(COSTS.get(layout, {}).values()) else set())


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", covered({layout: covered_axes(layout) - {"weights"} for layout in LAYOUTS}))
def test_tokens_are_one_devices_with_hits_and_preemption(folder: Path, expected: Callable[[str], list[Any]], layout: str) -> None:
    settings = TINY | SMALL | LAYOUTS[layout]
    llm = LLM(str(folder), **settings)
    of_one = expected(LAYOUTS[layout].get("weights", "auto"))
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == of_one
    assert tokens_of(llm.generate(PROMPTS[-2:], GREEDY)) == of_one[-2:]  # of which much is cached
    stats = llm.engine.stats
    assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0
    assert stats.num_compilations_after_ready == 0
    assert stats.heads == COSTS.get(layout, stats.heads)
    for name in ("shared",) if "shared KV pages" in stats.memory else ("prefill", "decode"):
        left = parse_bytes("kv_memory", settings["kv_memory"]) - stats.memory[f"{name} KV pages"]
        assert 0 <= left < 3 * HEAD_BYTES  # less than a page, of the most heads that a device has here
    if settings["prefill_devices"] != settings["decode_devices"]:
        assert stats.num_pages_moved > 0
    assert_all_free(llm.engine)


def test_pages_on_disk_are_of_use_to_a_mesh_with_other_heads(folder: Path, expected: Callable[[str], list[Any]], tmp_path: Path) -> None:
    tiers = {"kv_host_memory": "4MiB", "kv_disk": f"{tmp_path / 'kv'}:4MiB"}
    restored = []
    for layout in ("two", "eight"):
        with LLM(str(folder), **TINY | SMALL | LAYOUTS[layout] | tiers) as llm:
            llm.engine._components.prefill.tiers._seconds_to_compute = lambda num_tokens: float("inf")  # whatever there is, is fetched
            assert tokens_of(llm.generate(PROMPTS[-2:], GREEDY)) == expected("auto")[-2:]
            restored.append(llm.engine.stats.num_restored_tokens)
            assert llm.engine.stats.num_compilations_after_ready == 0
    assert restored[0] == 0 and restored[1] >= len(PROMPTS[-1]) // 16 * 16


@pytest.mark.exhaustive  # the tiny model's heads are of these numbers
def test_the_default_model_says_on_two_and_four_devices_what_the_reference_says() -> None:
    golden = next(golden for golden in read.load() if golden.name == "fact")
    llm = LLM(
        kv_memory="64MiB",
        max_model_len=256,
        max_batch_size=1,
        decode_buckets=(1,),
        prefill_buckets=(32,),
        prefill_chunk_size=32,
        prefill_devices=(0, 1),
        decode_devices=(2, 3, 4, 5),
    )
    [[tokens]] = tokens_of(llm.generate([golden.prompt_ids], SamplingParams(temperature=0.0, max_tokens=8)))
    assert tokens == golden.tokens[:8]
