"""Pages that fall out of the devices and come back from host memory or a file, on the real engine: the tokens are those without."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.config import ConfigError
from jaxinfer.kv_tiers.disk_file import ALIGNMENT, ENTRY_SIZE, TABLE_ENTRIES
from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from jaxinfer.stats import TierStats
from tests import tiny_model
from tests.conftest import TINY, MakeLLM
from tests.engine.page_audit import assert_all_free
from tests.engine.test_token_equality import LAYOUTS, SMALL, chosen
from tests.engine.workload import tokens_of, workload

PROMPTS, PARAMS = workload()
LONG = [prompt for prompt in PROMPTS if len(prompt) >= 100]  # 1,100 tokens in all, and the pool holds 1,008
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DISK_SIZE = "4MiB"

Make = Callable[..., LLM]


@pytest.fixture
def make(tiny_model_path: Path) -> Iterator[Make]:
    """Gives LLMs with host memory for pages, and closes them. Whatever is in the tiers is fetched: to compute takes for ever."""
    made = []

    def make_llm(model: Path = tiny_model_path, seconds_to_compute: float = float("inf"), **settings: Any) -> LLM:
        made.append(LLM(str(model), **TINY | SMALL | {"kv_host_memory": "4MiB"} | settings))
        made[-1].engine._components.prefill.tiers._seconds_to_compute = lambda num_tokens: seconds_to_compute
        return made[-1]

    yield make_llm
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def long_tokens(llms: MakeLLM) -> list[list[list[int]]]:
    return tokens_of(llms().generate(LONG, GREEDY))


def tier_stats(llm: LLM) -> TierStats:
    assert llm.engine.stats.read_tiers is not None
    return llm.engine.stats.read_tiers()


def fill(make: Make, path: Path, **settings: Any) -> None:
    """Leave a file with the pages of the long prompts and their answers."""
    with make(kv_disk=f"{path}:{DISK_SIZE}", **settings) as llm:
        llm.generate(LONG, GREEDY)


@pytest.mark.parametrize("layout", chosen(["one device", "two devices", "one mesh of two", "two meshes of two", "two stages to a device"]))
def test_tokens_are_the_same_when_pages_go_down_and_come_back(make, expected, layout):
    # Two devices hold twice as many pages.
    llm = make(**LAYOUTS.get(layout, {}) | SMALL | {"kv_memory": "256KiB" if layout.endswith("of two") or "stages" in layout else "512KiB"})
    stats = llm.engine.stats
    for _ in range(3):
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected
        assert_all_free(llm.engine)
    assert stats.num_restored_tokens > 200
    assert tier_stats(llm).num_host_hits * 16 >= stats.num_restored_tokens
    assert stats.num_compilations_after_ready == 0


def test_whoever_goes_away_while_pages_come_leaves_nothing_behind(make, long_tokens):
    llm = make()
    for turn in range(4):
        for number, prompt in enumerate(LONG):
            llm.engine.add_request(f"{turn}-{number}", prompt, GREEDY)
        for number in range(len(LONG)):
            llm.engine.abort(f"{turn}-{number}")
            llm.engine.step()
        assert_all_free(llm.engine)
        assert tokens_of(llm.generate(LONG, GREEDY)) == long_tokens
    assert llm.engine.stats.num_restored_tokens > 0


def test_what_is_dearer_to_fetch_than_to_compute_is_computed(make, long_tokens):
    llm = make(seconds_to_compute=0.0)
    for _ in range(2):
        assert tokens_of(llm.generate(LONG, GREEDY)) == long_tokens
    assert tier_stats(llm).host_pages > 30
    assert llm.engine.stats.num_restored_tokens == tier_stats(llm).num_host_hits == 0


def test_rates_are_measured_before_the_first_request(make):
    """What is slow to read is not fetched, what is quick is, by the engine's own numbers."""
    llm = make()
    tiers, chunk_controller = llm.engine._components.prefill.tiers, llm.engine._components.prefill.chunk_controller
    assert 0 < chunk_controller.seconds_to_compute(16) < 1
    assert 0 < tiers._seconds_to_move * 7 < 1
    tiers._seconds_to_compute = chunk_controller.seconds_to_compute
    llm.generate(LONG, GREEDY)
    host = tiers.tiers._host
    host.rate.observe(8192, 100.0, time.monotonic())  # a hundred seconds for a page
    llm.generate(LONG, GREEDY)
    assert llm.engine.stats.num_restored_tokens == 0


@pytest.mark.parametrize("layout", ["one device", "two devices"])
def test_a_restart_finds_the_pages_of_the_run_before(make, long_tokens, tmp_path, tiny_model_path, layout):
    """Also one with other devices, and with the model in another folder."""
    path = tmp_path / "kv"
    fill(make, path, **LAYOUTS.get(layout, {}))
    elsewhere = tiny_model.write(tmp_path / "elsewhere")
    llm = make(elsewhere, kv_disk=f"{path}:{DISK_SIZE}")
    before = tier_stats(llm)
    assert before.host_pages == 0
    assert before.disk_pages >= sum((len(prompt) + 19) // 16 for prompt in LONG), "answers too, and what devices had at the end"
    assert tokens_of(llm.generate(LONG, GREEDY)) == long_tokens
    after, stats = tier_stats(llm), llm.engine.stats
    assert after.refused == {}
    assert stats.num_restored_tokens >= sum((len(prompt) - 1) // 16 * 16 for prompt in LONG)
    assert stats.num_cached_tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in LONG)
    assert after.num_disk_hits > 0
    assert stats.num_compilations_after_ready == 0


def change_bytes(path: Path, where: str) -> int:
    """Change a byte of each page of a file, or of each entry of its tables; returns how many there were."""
    random, data = np.random.default_rng(5), bytearray(path.read_bytes())
    page_bytes, num_changed = 8192, 0
    group_bytes = ALIGNMENT + TABLE_ENTRIES * page_bytes
    for table in range(ALIGNMENT, len(data), group_bytes):
        for slot in range(TABLE_ENTRIES):
            entry, page = table + slot * ENTRY_SIZE, table + ALIGNMENT + slot * page_bytes
            if page + page_bytes > len(data) or not any(data[entry : entry + ENTRY_SIZE]):
                continue
            at = entry + int(random.integers(80)) if where == "entries" else page + int(random.integers(page_bytes))
            data[at] ^= 1 << int(random.integers(8))
            num_changed += 1
    path.write_bytes(data)
    return num_changed


@pytest.mark.parametrize(("where", "reason"), [("pages", "damaged"), ("entries", "torn")])
def test_a_changed_byte_anywhere_is_seen_and_the_page_computed(make, long_tokens, tmp_path, where, reason):
    path = tmp_path / "kv"
    fill(make, path)
    num_changed = change_bytes(path, where)
    assert num_changed > 60
    llm = make(kv_disk=f"{path}:{DISK_SIZE}")
    assert tokens_of(llm.generate(LONG, GREEDY)) == long_tokens
    assert llm.engine.stats.num_restored_tokens == 0
    refused = tier_stats(llm).refused
    assert set(refused) == {reason}
    assert refused[reason] == num_changed if where == "entries" else refused[reason] >= len(LONG), "of each prompt one page was tried"


def test_a_file_of_another_version_or_layout_starts_over_and_one_of_something_else_is_left_alone(make, long_tokens, tmp_path):
    path = tmp_path / "kv"
    fill(make, path)
    llm = make(kv_disk=f"{path}:{DISK_SIZE}", page_size=8)
    assert tier_stats(llm).refused == {"other layout": 1}
    assert tier_stats(llm).disk_pages == 0
    assert tokens_of(llm.generate(LONG, GREEDY)) == long_tokens
    llm.close()
    with path.open("r+b") as file:
        file.seek(16)
        file.write(b"\x07")
    llm = make(kv_disk=f"{path}:{DISK_SIZE}", page_size=8)
    assert tier_stats(llm).refused == {"other version": 1}
    other = tmp_path / "letters"
    other.write_text("Dear Sir or Madam,")
    with pytest.raises(ConfigError, match="is not a file of KV pages"):
        make(kv_disk=f"{other}:{DISK_SIZE}")
    assert other.read_text() == "Dear Sir or Madam,"


def test_pages_of_another_model_of_the_same_shapes_are_never_used(make, llm, tiny_model_path, tmp_path):
    """A model that differs in one number, of the last row of a matrix."""
    path = tmp_path / "kv"
    fill(make, path)
    other = tiny_model.write(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"][-1, -1] += 3.0
    save_file(weights, other / "model.safetensors")
    num_pages = len(LONG) * 6
    of_other = make(other, kv_disk=f"{path}:{DISK_SIZE}")
    assert tier_stats(of_other).disk_pages == 0
    assert tier_stats(of_other).refused["other model"] > num_pages
    tokens = tokens_of(of_other.generate(LONG, GREEDY))
    assert of_other.engine.stats.num_restored_tokens == 0
    with LLM(str(other), **TINY | SMALL) as without:
        assert tokens == tokens_of(without.generate(LONG, GREEDY))
    of_other.close()
    again = make(kv_disk=f"{path}:{DISK_SIZE}")  # the first model's, those that the other one had no need to write over
    assert tokens_of(again.generate(LONG, GREEDY)) == tokens_of(llm.generate(LONG, GREEDY))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_or_fails_costs_pages_and_nothing_else(make, long_tokens, tmp_path, monkeypatch, error):
    llm, write, num_written = make(kv_disk=f"{tmp_path / 'kv'}:{DISK_SIZE}", kv_host_memory="400KiB"), os.pwrite, 0

    def fail(*arguments: Any) -> int:
        nonlocal num_written
        num_written += 1
        if num_written > 20:
            raise OSError(error, os.strerror(error))
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", fail)
    for _ in range(3):
        assert tokens_of(llm.generate(LONG, GREEDY)) == long_tokens
    stats = tier_stats(llm)
    assert stats.num_failed_writes > 0
    assert stats.num_dropped > 0
    assert stats.disk_pages <= 10
    llm.close()


def test_host_memory_is_for_pages_kept_and_pages_on_their_way_up(make):
    llm = make(kv_host_memory="1MiB")
    tiers = llm.engine._components.prefill.tiers
    assert tier_stats(llm).host_size + tiers._most_fetched * 8192 == 1 << 20
    assert tiers._most_fetched == 32


def test_an_engine_may_be_closed_twice(make, tmp_path):
    llm = make(kv_disk=f"{tmp_path / 'kv'}:{DISK_SIZE}")
    llm.generate(LONG, GREEDY)
    llm.close()
    written = tier_stats(llm).written_bytes
    llm.close()
    assert tier_stats(llm).written_bytes == written > 0
    assert tier_stats(make(kv_disk=f"{tmp_path / 'kv'}:{DISK_SIZE}")).disk_pages > 0, "the file is free, and has the pages"
