"""What a step does, added up from a model's arrays."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxinfer.architecture.known_models import known_shapes, model_shape
from jaxinfer.models.registry import read_config
from jaxinfer.planner.model_work import ModelWork, model_work
from jaxinfer.planner.stage_partition import cut, stage_layers
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ExpertFormat, ModelWeightFormat
from jaxinfer.weights.template import ModelTemplate, make_template
from sharding.cost_model import LayerWork
from sharding.hardware import HARDWARE
from sharding.layout import Parallel
from sharding.rules import TENSOR_PARALLEL

BFLOAT16 = jnp.dtype("bfloat16")


@cache
def template(name: str, **experts: Any) -> ModelTemplate:
    return make_template(read_config(model_shape(name)), ModelWeightFormat(Plain(BFLOAT16), experts=ExpertFormat(**experts)))


@cache
def work_of(name: str, **experts: Any) -> ModelWork:
    return model_work(template(name, **experts), TENSOR_PARALLEL)


def all_bytes(part: LayerWork) -> int:
    experts = part.experts
    return part.matrices.split_bytes + part.matrices.whole_bytes + (experts.num_experts * experts.expert_bytes if experts else 0)


def active_values(work: ModelWork) -> int:
    """A token's."""
    dense = sum(part.matrices.split_values + part.matrices.whole_values for part in (*work.layers, work.head))
    return dense + sum(p.experts.top_k * p.experts.expert_values for p in work.layers if p.experts)


@pytest.mark.parametrize("name", known_shapes())
def test_every_array_is_of_one_part(name: str) -> None:
    """But the embedding's table, of which rows are taken."""
    made, work = template(name), work_of(name)
    besides = [leaf for leaf in made.leaves if leaf.paths[0].startswith("embedding")]
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in made.leaves if leaf not in besides)
    parts = sum(map(all_bytes, (*work.layers, work.head)))
    tied = all_bytes(work.head) if made.config.tie_word_embeddings else 0  # type: ignore[union-attr]
    assert abs(parts - tied - whole) <= 2 * made.config.hidden_size, "the final norm is nobody's"


def test_values_are_the_published_ones() -> None:
    """Those that a token is multiplied with: all but the embedding, and of mixtures the experts that it takes."""
    assert active_values(work_of("llama-3.1-8b")) == pytest.approx(8.03e9 - 128256 * 4096, rel=2e-3)
    assert active_values(work_of("smollm2-135m")) == pytest.approx(134.5e6, rel=1e-2)
    absorbed = 61 * 64 * 256 * 512  # counted with attention
    assert active_values(work_of("kimi-k2.5", packing="int4")) + absorbed == pytest.approx(32e9, rel=0.05)
    assert active_values(work_of("llama-4-scout")) + 202048 * 5120 == pytest.approx(17e9, rel=0.02), "the embedding is among the 17"


def test_packed_experts_are_fewer_bytes_and_as_many_values() -> None:
    plain, packed = (work_of("kimi-k2.5", packing=packing).layers[5].experts for packing in (None, "int4"))
    assert plain is not None and packed is not None
    assert plain.expert_values == packed.expert_values == 3 * 7168 * 2048
    assert plain.expert_bytes == 2 * plain.expert_values
    assert packed.expert_bytes == pytest.approx(4.5 / 8 * packed.expert_values)
    assert (plain.num_experts, plain.top_k, packed.dtype, packed.has_shared) == (384, 8, "int4", True)
    without = work_of("qwen3-235b-a22b").layers[5].experts
    assert without is not None and not without.has_shared


def test_layers_attend_as_they_are_configured() -> None:
    scout = work_of("llama-4-scout").layers
    assert sum(part.attention.chunk == 8192 for part in scout if part.attention) == 36
    kimi = work_of("kimi-k2.5").layers[0].attention
    assert kimi is not None
    assert (kimi.token_bytes, kimi.is_split) == (576 * 2, True)
    assert kimi.exchanged_bytes == 64 * (576 + 512) * 2
    llama = work_of("llama-3.1-8b").layers[0].attention
    assert llama is not None
    assert (llama.token_bytes, llama.decode_values) == (4096, 2 * 4096)


def test_stages_have_what_is_before_and_after_the_layers() -> None:
    work = work_of("smollm2-135m")
    assert work.of_stage(range(30)) == [work.embedding, *work.layers, work.head]
    assert work.of_stage(range(2, 4)) == list(work.layers[2:4])
    assert work.of_stage(range(1)) == [work.embedding, work.layers[0]]
    assert work.of_stage(range(29, 30)) == [work.layers[29], work.head]


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "deepseek-v3"])
def test_a_stages_bytes_are_those_of_its_template(name: str) -> None:
    """The tied table, which the last stage has too, and modules that nothing runs among them."""
    made, work = template(name), work_of(name)
    for num_stages in (1, 3):
        for of_stage in cut(made, stage_layers(work, Parallel(1, num_stages), ["decode"], HARDWARE["h100"])):
            num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in of_stage.leaves)
            assert work.weights.on_device(of_stage.layers, 1) == num_bytes
    mesh = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))
    halves = made.abstract(mesh, TENSOR_PARALLEL) if name != "smollm2-135m" else ()  # type: ignore[arg-type]
    halved = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in halves)
    assert not halves or work.weights.on_device(range(len(work.layers)), 2) == halved
