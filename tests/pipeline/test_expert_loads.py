"""How evenly experts are used: what the programs count, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import SamplingParams
from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers.router import Router
from jaxinfer.pipeline.expert_loads import expert_load, with_loads
from jaxinfer.stats import ExpertLoad
from tests.families.serving import serve


class Blocks(nnx.Module):
    """As a model's blocks after a step, of which the first one is dense."""

    def __init__(self, chosen: list[list[list[int]]]) -> None:
        self.blocks = nnx.List([nnx.Module(), *(Router(4, Routing(4, 2, "softmax")) for _ in chosen)])
        for block, of_layer in zip(self.blocks[1:], chosen, strict=True):
            block.chosen = nnx.Intermediate(jnp.asarray(of_layer))


def test_tokens_are_counted_by_layer_and_expert_and_padding_is_not() -> None:
    layers = [[[0, 1], [0, 3], [2, 2]], [[3, 2], [3, 1], [0, 0]]] + [[[0, 1], [0, 1], [0, 1]]] * 9
    counts = jnp.ones((11, 4), jnp.int32)
    found = np.asarray(with_loads(counts, Blocks(layers), jnp.array([True, True, False])))
    np.testing.assert_array_equal(found[0], [3, 2, 1, 2])
    np.testing.assert_array_equal(found[1], [1, 2, 2, 3])
    np.testing.assert_array_equal(found[2:], [[3, 3, 1, 1]] * 9)  # more layers than digits


def test_counts_that_grow_large_are_halved_together() -> None:
    counts = jnp.array([[2**30 - 2, 2**20, 6, 0]], jnp.int32)
    two_more = np.asarray(with_loads(counts, Blocks([[[0, 1], [0, 3]]]), jnp.array([True, True])))
    np.testing.assert_array_equal(two_more, [[2**29, 2**19, 3, 0]])


def test_without_experts_nothing_is_counted() -> None:
    assert with_loads(None, Blocks([]), jnp.array([True])) is None
    assert expert_load(np.zeros((2, 4), int), 2) is None


def test_the_busiest_is_told_as_a_multiple_of_the_mean() -> None:
    counts = np.array([[8, 0, 0, 0], [2, 2, 2, 2], [3, 1, 0, 4]])
    assert expert_load(counts, 1) == ExpertLoad((4 + 1 + 2) / 3, 4.0, None)
    assert expert_load(counts, 2) == ExpertLoad((4 + 1 + 2) / 3, 4.0, (2 + 1 + 1) / 3)


@pytest.mark.parametrize("layout", [pytest.param("tp=2,ep=2", marks=pytest.mark.exhaustive), "tp=1,pp=2"])
def test_an_engine_tells_of_the_tokens_it_was_given_and_gave(tmp_path: Path, layout: str) -> None:
    llm = serve(tmp_path, "llama_4", prefill_parallel=layout, decode_parallel=layout)
    stats = llm.engine.stats
    assert stats.read_expert_loads is not None and stats.read_expert_loads() == {}, "warming up doesn't count"
    prompts = [list(range(5, 50)), [7, 8, 9]]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    assert {role: load.of_devices is None for role, load in stats.read_expert_loads().items()} == dict.fromkeys(
        ("prefill", "decode"), "ep" not in layout
    )
    routing, parts = llm.engine._components.plan.template.config.family.routing, llm.engine._components
    for loads, num_tokens in ((parts.prefill.worker.runner.loads, 48), (parts.decode.worker.runner.loads, 2 * 9)):
        counts = np.concatenate([np.asarray(of_stage) for of_stage in loads.counts if of_stage is not None])
        np.testing.assert_array_equal(counts.sum(1), num_tokens * routing.top_k)
    assert stats.num_compilations_after_ready == 0
