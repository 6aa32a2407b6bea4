"""The same greedy tokens however prefill's and decode's devices share the work: tensor parallel, pipelines, both, and meshes of different shape.

The model's two KV heads are copied where a stage has four devices. Pages are few enough to run out, and prompts begin alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from sharding.layout import Parallel
from tests import tiny_model
from tests.covering import covered
from tests.engine.page_audit import assert_all_free
from tests.engine.workload import alone, tokens_of

LAYOUTS = ("tp=1", "tp=2", "tp=4", "tp=1,pp=2", "tp=1,pp=4", "tp=2,pp=2")
SHARED = ("tp=2,pp=4", "tp=4,pp=2", *LAYOUTS)  # the first two are of eight devices
NUM_LAYERS, NUM_PAGES = 4, 40
SETTINGS = {
    "dtype": "float32",
    "max_batch_size": 12,
    "decode_buckets": (12,),
    "prefill_buckets": (32,),
    "prefill_chunk_size": 32,
    "max_model_len": 160,
    "page_size": 8,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "four_layers", num_hidden_layers=NUM_LAYERS)


def prompts() -> list[list[int]]:
    """Of many lengths; those of every third begin with the same 40 tokens."""
    random = np.random.default_rng(3)
    common = random.integers(0, 500, 40).tolist()
    return [(common if i % 3 == 0 else []) + random.integers(0, 500, int(random.integers(1, 60))).tolist() for i in range(18)]


@cache
def expected(folder: Path) -> list[list[list[int]]]:
    """Each by itself, on one device."""
    llm = LLM(str(folder), **SETTINGS | {"kv_memory": "8MiB"})
    return alone(llm, prompts(), [GREEDY] * len(prompts()))


def axes(role: str, layout: str) -> set[str]:
    """What a role's layout does."""
    parallel = Parallel.parse(layout)
    found = {f"{role} {name}" for name, size in (("tp", parallel.tp), ("pp", parallel.pp)) if size > 1}
    found |= {"copies of heads"} if parallel.tp > tiny_model.KV_HEADS else set()
    return found | ({"eight devices"} if parallel.num_devices == 8 else set())


def page_bytes(layout: str) -> int:
    """On a device."""
    parallel = Parallel.parse(layout)
    return NUM_LAYERS // parallel.pp * -(-tiny_model.KV_HEADS // parallel.tp) * 2 * tiny_model.HEAD * SETTINGS["page_size"] * 4


def check(llm: LLM, folder: Path) -> None:
    asked = prompts()
    assert tokens_of(llm.generate(asked, GREEDY)) == expected(folder)
    again = llm.generate(asked[:3], GREEDY)  # what is left of the first time in the prefix cache is used
    assert tokens_of(again) == expected(folder)[:3]
    siblings = llm.generate(asked[1], replace(GREEDY, n=3, max_tokens=9))  # which start from copies of its last page
    assert tokens_of(siblings) == [[expected(folder)[1][0][:9]] * 3]
    assert llm.engine.stats.num_cached_tokens > 0
    assert llm.engine.stats.num_compilations_after_ready == 0
    assert_all_free(llm.engine)


# The next layout's first and each one's own last, so that the cases which `make test` takes hand over between different ones.
PAIRS = [(prefill, LAYOUTS[(i + shift) % len(LAYOUTS)]) for shift in (1, 2, 3, 4, 5, 0) for i, prefill in enumerate(LAYOUTS)]
# Each with what it has of each role.
CASES = {
    **{f"{prefill} to {decode}": {"two meshes", *axes("prefill", prefill), *axes("decode", decode)} for prefill, decode in PAIRS},
    **{one: {"one mesh", *axes("both", one)} for one in SHARED},
}


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", covered(CASES))
def test_layouts_give_one_devices_tokens(folder: Path, layout: str) -> None:
    """Of two that hand over from one mesh to another, or of one for both on the same."""
    prefill, _, decode = layout.partition(" to ")
    if decode:
        check_on_two_meshes(folder, prefill, decode)
    else:
        check_on_one_mesh(folder, prefill)


def check_on_two_meshes(folder: Path, prefill: str, decode: str) -> None:
    kv_bytes = NUM_PAGES * max(page_bytes(prefill), page_bytes(decode))
    prefill_devices, decode_devices = range(Parallel.parse(prefill).num_devices), range(4, 4 + Parallel.parse(decode).num_devices)
    llm = LLM(
        str(folder),
        **SETTINGS,
        kv_memory=f"{kv_bytes}B",
        prefill_parallel=prefill,
        decode_parallel=decode,
        prefill_devices=tuple(prefill_devices),
        decode_devices=tuple(decode_devices),
    )
    check(llm, folder)
    assert llm.engine.stats.num_pages_moved > 50
    if page_bytes(decode) >= page_bytes(prefill):
        assert llm.engine.stats.num_preemptions > 0


def check_on_one_mesh(folder: Path, layout: str) -> None:
    llm = LLM(str(folder), **SETTINGS, kv_memory=f"{NUM_PAGES * page_bytes(layout)}B", prefill_parallel=layout)
    assert llm.engine.shares_mesh
    check(llm, folder)
    assert llm.engine.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("tp", "pp", "weights"),
    [*(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((4, 2, "auto"), (2, 1, "int8"), (4, 1, "auto"), (2, 2, "auto")))],
)
def test_tokens_that_are_split_between_sums_give_one_devices(folder: Path, tp: int, pp: int, weights: str) -> None:
    """Integers', which are rounded part by part, beside those of the same layout with whole tokens."""
    layout = f"tp={tp},pp={pp}"
    settings = {**SETTINGS, "kv_memory": f"{NUM_PAGES * page_bytes(layout)}B", "prefill_parallel": layout, "weights": weights}
    llm = LLM(str(folder), **settings, sequence_parallel="on")
    if weights == "auto":
        check(llm, folder)
    else:
        whole = LLM(str(folder), **settings, sequence_parallel="off")
        assert tokens_of(llm.generate(prompts(), GREEDY)) == tokens_of(whole.generate(prompts(), GREEDY))
