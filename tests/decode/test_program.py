"""The decode program's forward pass, a token a row over pages, against the plain one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decode.batch import empty_batch
from jaxinfer.decode.program import forward
from tests import model_on_mesh
from tests.tiny_model import VOCAB

NUM_SLOTS = 8


@pytest.mark.parametrize("attention", ["xla", "llvm_cpu"])
@pytest.mark.parametrize("devices", [(0,), (4, 5)])
def test_every_step_of_every_row_has_the_plain_passes_logits(tiny_model_path, devices, attention):
    model = model_on_mesh.put(tiny_model_path, devices)
    random = np.random.default_rng(0)
    texts = [random.integers(0, VOCAB, length).tolist() for length in (40, 17, 1, 29)]
    pages = np.split(random.permutation(np.arange(1, 64))[: 4 * 5].astype(np.int32), 4)
    slots = [6, 0, 3, 2]
    page_table = np.zeros((NUM_SLOTS + 1, 5), np.int32)
    page_table[slots] = pages

    @model.jit
    def step(module, pages, batch):
        hidden, pages = forward(module, model.mesh, pages, batch.tokens, batch, jnp.asarray(page_table), attention)
        return module.logits(hidden), pages

    found = [[] for _ in texts]
    for position in range(max(map(len, texts))):
        batch = empty_batch(5, NUM_SLOTS)  # one row of padding at least, more as texts end
        running = [i for i, text in enumerate(texts) if position < len(text)]
        for row, i in enumerate(running):
            batch.slots[row], batch.tokens[row], batch.positions[row] = slots[i], texts[i][position], position
            batch.pages[row] = pages[i][position // model.pool.spec.page_size]
        logits, model.pool.array = step(model.pool.array, batch)
        for row, i in enumerate(running):
            found[i].append(np.asarray(logits[row]))
    for text, parts in zip(texts, found, strict=True):
        np.testing.assert_allclose(np.stack(parts), model.plain_logits(text), atol=2e-4)
