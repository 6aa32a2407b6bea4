"""Layers of windows and chunks beside layers that attend to everything, with too few pages: who gives way computes again and says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.config import ConfigError
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from jaxinfer.models.registry import read_config
from tests.engine.roll_backs import run_with_roll_backs
from tests.families import checkpoint
from tests.families.serving import GREEDY, SETTINGS, check_continuation, serve
from tests.golden.family_logits.read import load

CONTEXT = 104  # tokens: the longest prompt and its answer


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("is_shared", [True, False], ids=["one mesh", "two meshes"])
@pytest.mark.parametrize("family", ["gemma_3", "llama_4"])
def test_preemption_changes_no_token_and_pages_stay_bounded(tmp_path: Path, family: str, is_shared: bool) -> None:
    spec = PageSpec.of(read_config(checkpoint.config_of(family)), SETTINGS["page_size"], 4)
    assert any(spec.is_bounded)
    num_pages = spec.max_pages(CONTEXT, 32) + 1
    devices = {} if is_shared else {"prefill_devices": (0,), "decode_devices": (1,)}
    llm = serve(tmp_path, family, kv_memory=f"{num_pages * spec.page_bytes}B", max_model_len=CONTEXT, **devices)
    assert llm.engine.stats.decode_pages == num_pages - 1
    *shorter, longest = load(family)
    goldens = [*shorter * 4, longest]  # the shorter ones are begun together, and meet as they grow
    for golden, output in zip(goldens, llm.generate([golden.prompt_ids for golden in goldens], GREEDY), strict=True):
        check_continuation(golden, output)
    siblings = llm.generate(longest.prompt_ids, replace(GREEDY, n=2))[0]
    assert [answer.token_ids for answer in siblings.outputs] == [longest.tokens] * 2
    stats = llm.engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_compilations_after_ready == 0
    assert stats.prefill_pages_used == stats.decode_pages_used == 0


@pytest.mark.parametrize("family", ["gemma_3", "llama_4"])
def test_a_long_context_holds_the_pages_of_its_spans_alone(tmp_path: Path, family: str) -> None:
    llm = serve(tmp_path, family)
    engine, (*_, golden) = llm.engine, load(family)
    manager = engine._components.decode.manager
    spec, most = manager.spec, 0
    engine.add_request("long", golden.prompt_ids, GREEDY)
    while engine.has_work:
        engine.step()
        for sequence in engine._components.decode.scheduler.running:
            for group, is_bounded in enumerate(spec.is_bounded):
                held = sum(page != NULL_PAGE for page in sequence.decode.pages[group :: spec.num_groups])
                assert held <= (spec.max_blocks(group, 1) + 1 if is_bounded else spec.blocks_for(len(sequence.token_ids)))
            most = max(most, manager.num_used)
    assert 0 < most < spec.num_groups * spec.blocks_for(CONTEXT - 2)
    # What was given back limits how far a sequence can be rolled back, not what it says after it.
    engine.add_request("back and forth", golden.prompt_ids, GREEDY)
    tokens, times = run_with_roll_backs(engine, np.random.default_rng(0))
    assert tokens == {("back and forth", 0): list(golden.tokens)}
    assert sum(times.values()) > 1


def test_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_host_memory is given, but this model has layers with windows or chunks"):
        serve(tmp_path, "gemma_3", kv_host_memory="1MiB")
