"""The prefill program's forward pass, over pages, against the plain one."""

import numpy as np
import pytest

from jaxinfer.prefill.batch import empty_batch
from jaxinfer.prefill.program import forward
from tests import model_on_mesh
from tests.tiny_model import VOCAB


@pytest.mark.parametrize("attention", ["xla", "llvm_cpu"])
@pytest.mark.parametrize("devices", [(0,), (2, 3)])
def test_every_position_of_packed_chunks_has_the_plain_passes_logits(tiny_model_path, devices, attention):
    model = model_on_mesh.put(tiny_model_path, devices)

    @model.jit
    def forward_step(module, pages, batch):
        hidden, pages = forward(module, model.mesh, pages, batch, attention)
        return module.logits(hidden), pages

    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (70, 33, 1, 31)]
    pages = np.split(random.permutation(np.arange(1, 64))[: 4 * 10].astype(np.int32), 4)
    # (prompt, tokens cached before, tokens of the step), one list a step: chunks of one prompt lie in different steps and rows.
    steps = [[(0, 0, 40), (1, 0, 32)], [(1, 32, 1), (2, 0, 1), (0, 40, 30)], [(3, 0, 31)]]
    found = [[] for _ in prompts]
    for step in steps:
        batch, at, places = empty_batch(128, 4, 10).packed, 0, []
        for row, (prompt, start, length) in enumerate(step):
            batch.token_ids[at : at + length] = prompts[prompt][start : start + length]
            batch.page_table[row] = pages[prompt]
            batch.query_start[row], batch.query_len[row], batch.kv_len[row] = at, length, start + length
            places.append(at)
            at += -(-length // 32) * 32
        logits, model.pool.array = forward_step(model.pool.array, batch)
        for (prompt, _, length), place in zip(step, places, strict=True):
            found[prompt].append(np.asarray(logits)[place : place + length])
    for prompt, parts in zip(prompts, found, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), model.plain_logits(prompt), atol=2e-4)
