"""What a row brings reaches the products of every linear layer: rows of one batch with adapters of their own have the
logits of models into whose weights these were merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decode import program as decode_program
from jaxinfer.decode.batch import empty_batch as empty_decode_batch
from jaxinfer.decode.state import DecodeState
from jaxinfer.layers.step_context import StepContext
from jaxinfer.prefill import program as prefill_program
from jaxinfer.prefill.batch import empty_batch as empty_prefill_batch
from tests import model_on_mesh
from tests.tiny_model import VOCAB
from tests.weights.adapter_format import NUM_ADAPTERS, RANK, WithAdapters

ADAPTERS = (1, -1, 0)  # of the rows; -1: none
LENGTHS, NUM_STEPS = (12, 7, 9), 3
PAGE_SIZE, TABLE_WIDTH = 8, 3


def with_factors(model: model_on_mesh.OnMesh) -> model_on_mesh.OnMesh:
    """The model with adapters that are not zeros, each matrix's its own."""
    random, filled = np.random.default_rng(1), []
    for leaf, array in zip(model.template.leaves, model.weights, strict=True):
        if leaf.paths[0].endswith(("_down", "_up")):
            values = 0.3 * random.standard_normal(array.shape).astype(np.float32)
            array = jax.device_put(values, array.sharding)
        filled.append(array)
    return replace(model, weights=tuple(filled))


def merged(model: model_on_mesh.OnMesh, adapter: int) -> model_on_mesh.OnMesh:
    """With an adapter's products added to the matrices."""
    if adapter < 0:
        return model
    by_name: dict[str, np.ndarray] = {}
    for leaf, array in zip(model.template.leaves, model.weights, strict=True):
        by_name |= dict(zip(leaf.paths, np.asarray(array) if leaf.is_stack else np.asarray(array)[None], strict=True))
    ranks, weights, num_changed = slice(adapter * RANK, (adapter + 1) * RANK), [], 0
    for leaf, array in zip(model.template.leaves, model.weights, strict=True):
        name = leaf.paths[0]
        if f"{name}_up" in by_name:
            up, down, steps = (by_name[f"{name}_{part}"] for part in ("up", "down", "steps"))
            delta = np.tensordot(up[..., ranks], down[ranks], 1) / steps.reshape(steps.shape + (1,) * (down.ndim - 1))
            array = jax.device_put(np.asarray(array) + delta, array.sharding)
            num_changed += 1
        weights.append(array)
    assert num_changed == 4 * model.template.config.num_layers
    return replace(model, weights=tuple(weights))


def run(model: model_on_mesh.OnMesh, program: Callable[..., tuple[Any, Any]], *arguments: Any) -> tuple[Any, Any]:
    """A program of the weights, the pages and these, which returns the pages first."""
    with jax.set_mesh(model.mesh):
        return jax.jit(program, donate_argnums=1)(model.weights, model.pool.array, *arguments)


@pytest.mark.parametrize("device_ids", [(0,), (2, 3)], ids=["one device", "two devices"])
def test_rows_with_adapters_have_the_logits_of_merged_models(tiny_model_path: Path, device_ids: tuple[int, ...]) -> None:
    model = with_factors(model_on_mesh.put(tiny_model_path, device_ids, matrices=WithAdapters(jnp.dtype("float32"))))
    random = np.random.default_rng(0)
    texts = [random.integers(0, VOCAB, length + NUM_STEPS).tolist() for length in LENGTHS]
    alone = [merged(model, adapter).plain_logits(text) for adapter, text in zip(ADAPTERS, texts, strict=True)]
    assert min(np.abs(logits - model.plain_logits(text)).max() for logits, text in zip(alone[::2], texts[::2], strict=True)) > 0.5
    tables = 1 + np.arange(3 * TABLE_WIDTH, dtype=np.int32).reshape(3, TABLE_WIDTH)
    rows = 4  # one is padding

    template, mesh = model.template, model.mesh

    def prefill(weights, pages, batch, context):
        step = prefill_program.prefill_step(template, mesh, "xla")
        pages, (hidden, _), _ = step(weights, pages, None, batch, None, None, context)
        return pages, template.merge(weights).logits(hidden)

    batch = empty_prefill_batch(128, rows, TABLE_WIDTH).packed
    for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        batch.token_ids[32 * row : 32 * row + length] = text[:length]
        batch.page_table[row], batch.query_start[row] = tables[row], 32 * row
        batch.query_len[row] = batch.kv_len[row] = length
    context = StepContext(adapters=np.asarray([*ADAPTERS, -1], np.int32))
    model.pool.array, logits = run(model, prefill, batch, context)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(np.asarray(logits)[32 * row : 32 * row + length], alone[row][:length], atol=1e-4)

    def decode(weights, pages, batch, page_table, context):
        step = decode_program.forward_step(template, mesh, "xla")
        newest = jnp.zeros(rows + 1, jnp.int32)
        pages, _, hidden, _, _ = step(weights, pages, None, DecodeState(page_table), batch, None, newest, context)
        return pages, template.merge(weights).logits(hidden)

    page_table = np.concatenate([tables, np.zeros((rows + 1 - 3, TABLE_WIDTH), np.int32)])
    step = empty_decode_batch(rows, rows, num_new=NUM_STEPS)  # tokens that are verified at once have their row's adapter
    for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        places = np.arange(length, length + NUM_STEPS)
        step.slots[row], step.positions[row] = row, length
        step.new_tokens(1)[row], step.new_pages(1)[row, :, 0] = text[length:], tables[row, places // PAGE_SIZE]
    _, logits = run(model, decode, step, page_table, context)
    by_row = np.asarray(logits).reshape(rows, NUM_STEPS, VOCAB)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(by_row[row], alone[row][length:], atol=1e-4)


def test_an_empty_context_is_no_argument_of_a_program() -> None:
    assert StepContext().is_empty
    assert not jax.tree.leaves(StepContext())
    assert not StepContext(adapters=np.zeros(NUM_ADAPTERS, np.int32)).is_empty
