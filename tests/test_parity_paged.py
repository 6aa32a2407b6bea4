"""The default model's logits as the prefill and decode programs compute them, over pages, against the reference implementation's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from checkpoints.hub import resolve
from jaxinfer.decode import batch as decode_batch
from jaxinfer.decode import program as decode_program
from jaxinfer.prefill import batch as prefill_batch
from jaxinfer.prefill import program as prefill_program
from tests import model_on_mesh
from tests.golden import read

GOLDEN = read.load()
PAGE_SIZE, TABLE_WIDTH = 16, 104  # 1,664 tokens: the longest prompt and its answer
CHUNK, ROWS = 128, 8
NUM_STEPS = len(GOLDEN[0].tokens)


@pytest.fixture(scope="module")
def model() -> model_on_mesh.OnMesh:
    return model_on_mesh.put(resolve("default"), (0,), num_pages=1 + ROWS * TABLE_WIDTH, page_size=PAGE_SIZE)


@pytest.fixture(scope="module")
def prefill(model: model_on_mesh.OnMesh) -> Any:
    def logits(module: Any, pages: Any, batch: Any) -> Any:
        hidden, pages = prefill_program.forward(module, model.mesh, pages, batch)
        return module.logits(hidden), pages

    return model.jit(logits)


@pytest.fixture(scope="module")
def decode(model: model_on_mesh.OnMesh) -> Any:
    def logits(module: Any, pages: Any, batch: Any, page_table: Any) -> Any:
        hidden, pages = decode_program.forward(module, model.mesh, pages, batch.tokens, batch, page_table)
        return module.logits(hidden), pages

    return model.jit(logits)


@pytest.mark.exhaustive  # minutes; test_parity_golden.py has the same numbers from the engine
@pytest.mark.parametrize("first", range(0, len(GOLDEN), ROWS))
def test_prefill_and_every_decode_step_have_the_references_logits(
    model: model_on_mesh.OnMesh, prefill: Any, decode: Any, first: int
) -> None:
    goldens = GOLDEN[first : first + ROWS]
    tables = 1 + np.arange(ROWS * TABLE_WIDTH, dtype=np.int32).reshape(TABLE_WIDTH, ROWS).T  # neighbours in a row lie apart
    steps: list[list[np.ndarray]] = []
    for golden, table in zip(goldens, tables, strict=False):
        of_prompt = _prefill(model, prefill, golden.prompt_ids, table)
        difference = golden.prefill.difference(of_prompt[golden.prefill_positions])
        print(f"{golden.name}: prefill {difference:.1e}")  # pytest -s shows how near
        assert difference < read.MAX_LOGIT_DIFFERENCE, golden.name
        steps.append([of_prompt[-1]])
    for step in range(NUM_STEPS - 1):  # all rows at once, each fed the reference's token
        batch = decode_batch.empty_batch(ROWS, ROWS)
        for row, golden in enumerate(goldens):
            position = len(golden.prompt_ids) + step
            batch.slots[row], batch.tokens[row], batch.positions[row] = row, golden.tokens[step], position
            batch.pages[row] = tables[row, position // model.pool.spec.page_size]
        logits, model.pool.array = decode(model.pool.array, batch, np.concatenate([tables, np.zeros_like(tables[:1])]))
        for found, of_row in zip(steps, np.asarray(logits), strict=False):
            found.append(of_row)
    for golden, found in zip(goldens, steps, strict=True):
        difference = golden.steps.difference(np.stack(found))
        print(f"{golden.name}: decode {difference:.1e}")
        assert difference < read.MAX_LOGIT_DIFFERENCE, golden.name


def _prefill(model: model_on_mesh.OnMesh, prefill: Any, prompt: list[int], table: np.ndarray) -> np.ndarray:
    """Logits of every prompt position, in chunks."""
    parts = []
    for start in range(0, len(prompt), CHUNK):
        chunk = prompt[start : start + CHUNK]
        batch = prefill_batch.empty_batch(CHUNK, 1, TABLE_WIDTH).packed
        batch.token_ids[: len(chunk)] = chunk
        batch.page_table[0], batch.query_len[0], batch.kv_len[0] = table, len(chunk), start + len(chunk)
        logits, model.pool.array = prefill(model.pool.array, batch)
        parts.append(np.asarray(logits)[: len(chunk)])
    return np.concatenate(parts)
