"""Engines of other page sizes and layouts prefill for each other, whatever a family's layers keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.kv_transfer.page_client import PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from tests.engine.test_remote_handoffs import Pair, check_all_free
from tests.families.serving import serve

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "of_source", "of_target"),
    [
        ("gemma_3", {"prefill_parallel": "pp=2", "page_size": 4}, {"page_size": 16}),
        ("deepseek_v3", {"page_size": 16}, {"prefill_parallel": "tp=2", "page_size": 32}),
    ],
    ids=["windows in stages, pages of 4 to 16", "latents, whole to shared out, pages of 16 to 32"],
)
def test_tokens_are_one_engines(tmp_path: Path, family: str, of_source: dict[str, Any], of_target: dict[str, Any]) -> None:
    source = serve(tmp_path, family, kv_peers=True, prefill_chunk_size=32, prefill_buckets=(32,), **of_source)
    target = serve(tmp_path, family, kv_peers=True, **of_target)
    prompts = [np.random.default_rng(length).integers(5, 100, length).tolist() for length in (3, 16, 37, 90)]
    expected = [output.outputs[0].token_ids for output in target.generate(prompts, GREEDY)]
    target.engine._components.decode.manager.forget()
    pair = Pair(source.engine, target.engine, PageServer("127.0.0.1"), PageClient())
    for number, prompt in enumerate(prompts):
        pair.add_request(str(number), prompt, GREEDY)
    pair.run()
    assert [pair.tokens[str(number)] for number in range(len(prompts))] == expected
    assert target.engine.stats.num_taken_over == 0
    check_all_free(source.engine, target.engine)
    pair.server.close()
    pair.client.close()
