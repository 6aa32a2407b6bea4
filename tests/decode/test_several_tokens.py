"""A step of several new tokens a row gives the logits that as many steps of one token give, whatever a layer attends to and however a model is cut.

Rows begin their longer steps at different places, one begins behind pages of another's prefix, and every batch has padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.hub import open_source
from jaxinfer.decode.batch import ON_DEVICE, empty_batch
from jaxinfer.decode.program import forward_step
from jaxinfer.decode.state import DecodeState
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.models.base import ModelSlice
from jaxinfer.models.registry import config_of
from jaxinfer.pipeline.expert_loads import ExpertLoads
from jaxinfer.pipeline.stage import Stage, pass_on
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.load import load_weights
from jaxinfer.weights.template import make_template
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL
from tests import tiny_model
from tests.families import checkpoint

NUM_SLOTS, PAGE_SIZE, NUM_BLOCKS, NUM_ROWS = 8, 8, 6, 5
SLOTS = (6, 0, 3, 2)
LENGTHS = (45, 38, 41, 43)
PREFIX = 16  # tokens that the last row has from the first one's pages
FLOAT32 = ModelWeightFormat(Plain(jnp.dtype("float32")))
Devices = tuple[int, ...]  # of a stage


class Texts(NamedTuple):
    token_ids: list[np.ndarray]
    pages: np.ndarray  # [row, block, group]


def stages_on(folder: Path, places: tuple[Devices, ...], attention: Any) -> tuple[list[Stage], list[Any]]:
    """A model cut into as many stages, and their weights."""
    source, stages, weights = open_source(folder), [], []
    config = config_of(source)
    bounds = [config.num_layers * i // len(places) for i in range(len(places) + 1)]
    for number, devices in enumerate(places):
        layers = range(bounds[number], bounds[number + 1])
        part = None if len(places) == 1 else ModelSlice(layers, number == 0, number == len(places) - 1)
        template, mesh = make_template(config.on_devices(len(devices)), FLOAT32, part=part), make_mesh(devices)
        page_size = PAGE_SIZE * (len(devices) if config.latent is not None else 1)
        pool = PagePool(
            PageSpec.of(config, page_size, 4), 256, FLOAT32.vector_dtype, mesh, TENSOR_PARALLEL, template.heads, template.layers_of_group
        )
        stages.append(Stage(template, mesh, TENSOR_PARALLEL, pool, attention))
        weights.append(load_weights(template, source, mesh, TENSOR_PARALLEL))
    return stages, weights


def increments_of(stages: list[Stage]) -> list[Callable[..., Any]]:
    """Of each stage; the last one gives logits."""

    def step(stage: Stage, weights: Any, *arguments: Any) -> Any:
        pages, state, hidden, _, loads = forward_step(stage.template, stage.mesh, stage.attention)(weights, *arguments)
        return pages, state, stage.template.merge(weights).logits(hidden) if stage.template.is_last else hidden, loads

    return [jax.jit(partial(step, stage), donate_argnums=(1, 3)) for stage in stages]


def texts_for(spec: PageSpec) -> Texts:
    random = np.random.default_rng(0)
    token_ids = [random.integers(0, tiny_model.VOCAB, length) for length in LENGTHS]
    token_ids[-1][:PREFIX] = token_ids[0][:PREFIX]
    shape = (len(LENGTHS), NUM_BLOCKS, spec.num_groups)
    pages = (random.permutation(255)[: np.prod(shape)] + 1).reshape(shape).astype(np.int32)
    pages[-1, : PREFIX // spec.page_size] = pages[0, : PREFIX // spec.page_size]
    return Texts(token_ids, pages)


def logits_of(stages: list[Stage], weights: list[Any], steps: list[Callable[..., Any]], num_new: int) -> tuple[list[np.ndarray], Any]:
    """Of every position that is fed, with steps of `num_new` tokens wherever so many are left; and how often each expert was chosen."""
    spec, loads = stages[0].pool.spec, ExpertLoads(stages)
    texts = texts_for(spec)
    found: list[list[np.ndarray]] = [[] for _ in LENGTHS]
    table = np.zeros((NUM_SLOTS + 1, NUM_BLOCKS * spec.num_groups), np.int32)
    num_shared = PREFIX // spec.page_size * spec.num_groups
    table[SLOTS[-1], :num_shared] = texts.pages[-1].reshape(-1)[:num_shared]
    states = [DecodeState(page_table=jnp.asarray(table)) for _ in stages]
    for stage in stages:
        stage.pool.allocate()
    loads.reset()
    position = [0, 0, 0, PREFIX]
    while any(at < length for at, length in zip(position, LENGTHS, strict=True)):
        left = [length - at for at, length in zip(position, LENGTHS, strict=True)]
        is_long = [room >= num_new and len(of_row) >= row for row, (room, of_row) in enumerate(zip(left, found, strict=True))]
        for size, takes in ((num_new, is_long), (1, [not long for long in is_long])):
            running = [row for row in range(4) if takes[row] and left[row] and (row != 3 or position[0] >= PREFIX)]
            if not running:
                continue
            batch, newest = empty_batch(NUM_ROWS, NUM_SLOTS, spec.num_groups, size), np.zeros(NUM_SLOTS + 1, np.int32)
            for place, row in enumerate(running):
                here = np.arange(position[row], position[row] + size)
                batch.slots[place], batch.positions[place] = SLOTS[row], position[row]
                batch.new_tokens(spec.num_groups)[place] = texts.token_ids[row][here]
                batch.new_pages(spec.num_groups)[place] = texts.pages[row][here // spec.page_size]
                batch.new_tokens(spec.num_groups)[place, 0], newest[SLOTS[row]] = ON_DEVICE, texts.token_ids[row][here[0]]
            handed: Any = newest
            for number, stage in enumerate(stages):
                with jax.set_mesh(stage.mesh):
                    stage.pool.array, states[number], handed, loads.counts[number] = steps[number](
                        weights[number], stage.pool.array, None, states[number], batch, loads.counts[number], handed
                    )
                if stage is not stages[-1]:
                    handed = pass_on(handed, stages[number + 1])
            by_row = np.asarray(handed).reshape(NUM_ROWS, size, -1)
            for place, row in enumerate(running):
                found[row] += list(by_row[place])
                position[row] += size
    return [np.stack(of_row) for of_row in found], loads.read()


LLAMA, ONE = "llama", ((0,),)
CASES = {
    "xla": (LLAMA, ONE, "xla", (2, 4, 8)),
    "reference": (LLAMA, ONE, "reference", (4,)),
    "a CPU's kernel": (LLAMA, ONE, "llvm_cpu", (4,)),
    "two devices": (LLAMA, ((4, 5),), "xla", (4,)),
    "two stages": (LLAMA, ((0,), (3,)), "xla", (4,)),
    "windows and soft caps": ("gemma_3", ONE, "xla", (8,)),
    "latents": ("deepseek_v3", ONE, "xla", (4,)),
    "latents shared out over two devices": ("deepseek_v3", ((2, 3),), "xla", (4,)),
}


IN_CORE = (
    "xla",
    "a CPU's kernel",
    "windows and soft caps",
    "latents shared out over two devices",
    "two stages",
)  # with what the others have


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in IN_CORE else pytest.mark.exhaustive) for case in CASES])
def test_a_step_of_several_tokens_gives_the_logits_of_as_many_steps_of_one(tmp_path: Path, tiny_model_path: Path, case: str) -> None:
    family, places, attention, sizes = CASES[case]
    folder = tiny_model_path
    if family != LLAMA:
        folder = checkpoint.write(tmp_path, checkpoint.config_of(family), checkpoint.shapes_of(family))
    stages, weights = stages_on(folder, places, attention)
    steps = increments_of(stages)
    expected, expected_loads = logits_of(stages, weights, steps, 1)
    assert min(np.abs(logits).max() for logits in expected) > 1
    for num_new in sizes:
        found, loads = logits_of(stages, weights, steps, num_new)
        for logits, of_singles in zip(found, expected, strict=True):
            np.testing.assert_allclose(logits, of_singles, atol=2e-4)
        assert loads == expected_loads and (loads is None) == (family != "deepseek_v3")
