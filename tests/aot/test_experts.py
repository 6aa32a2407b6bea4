"""Expert layers compile for the GPUs that their kernel is written for, in the sizes of real models, and copy no expert."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers.moe import Experts, MixtureOfExperts, unsupported_reason
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ExpertFormat, ModelWeightFormat
from pallas_kernels.grouped_matmul.cases import CASES, ExpertsCase
from sharding.mesh import make_mesh
from sharding.partition import named_sharding, replicated
from sharding.rules import EXPERT_PARALLEL, TENSOR_PARALLEL, Rules
from sharding.targets import target_devices
from tests.aot.conftest import num_kernels

pytestmark = pytest.mark.aot

BFLOAT16 = jnp.dtype("bfloat16")
COLLECTIVES = r" (all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute)(?:-start)?\("


def routing_of(case: ExpertsCase) -> Routing:
    return Routing(case.num_experts, case.experts_per_token, "sigmoid", scales_input=case.experts_per_token == 1)


def compiled_for(mesh: Mesh, rules: Rules, build: Callable[[], nnx.Module], *inputs: tuple[tuple[int, ...], Any]) -> jax.stages.Compiled:
    """A layer's program on cards that aren't here, for inputs of these shapes and types that all of them have."""
    graph, state = nnx.split(nnx.eval_shape(build))
    flat = dict(nnx.to_flat_state(state))
    arrays = {}
    for path, param in flat.items():
        sharding = named_sharding(mesh, rules, param.get_metadata()["logical_axes"], param.shape, str(path))
        arrays[path] = jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)

    def run(arrays, *inputs):
        return nnx.merge(graph, nnx.from_flat_state({path: param.replace(arrays[path]) for path, param in flat.items()}))(*inputs)

    with jax.set_mesh(mesh):
        abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh)) for shape, dtype in inputs]
        return jax.jit(run).lower(arrays, *abstract).compile()


@pytest.mark.parametrize("num_tokens", [4, 2048])
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_kernels_and_no_copy_of_an_expert(case: ExpertsCase, num_devices: int, num_tokens: int) -> None:
    packing = None if case.format == "bfloat16" else case.format
    weight_format = ModelWeightFormat(Plain(BFLOAT16), experts=ExpertFormat(packing=packing, backend="mosaic_gpu"))
    assert unsupported_reason(case.inputs, case.outputs, num_devices, weight_format, BFLOAT16) is None
    mesh = make_mesh(range(num_devices), target_devices("h200", num_devices))
    chosen = (num_tokens, case.experts_per_token)
    inputs = (((num_tokens, case.inputs), BFLOAT16), (chosen, jnp.int32), (chosen, jnp.float32))
    compiled = compiled_for(mesh, TENSOR_PARALLEL, lambda: Experts(case.inputs, case.outputs, routing_of(case), weight_format), *inputs)
    assert num_kernels(compiled) == 2
    rows = max(math.prod(chosen), 256)
    assert compiled.memory_analysis().temp_size_in_bytes < rows * (4 * case.inputs + 6 * case.outputs) * 4 + 2**21


WHOLE_OR_COLUMNS = {"columns": TENSOR_PARALLEL, "whole": EXPERT_PARALLEL}


@pytest.mark.parametrize("rules", WHOLE_OR_COLUMNS)
@pytest.mark.parametrize("name", ["llama-4-scout", "kimi-k2.5"])
def test_a_mixture_on_eight_cards_costs_one_all_reduce_with_its_shared_expert(name: str, rules: str) -> None:
    num_tokens = 2048
    case = next(case for case in CASES if case.name == name)
    compiled = mixture_on_eight(case, WHOLE_OR_COLUMNS[rules], num_tokens, shared_size=case.outputs)
    assert num_kernels(compiled) == 2
    assert re.findall(COLLECTIVES, compiled.as_text()) == ["all-reduce"]
    assert f"bf16[{num_tokens},{case.inputs}]{{1,0}} all-reduce" in compiled.as_text()
    # A layer's experts on a card are 240 MiB (Scout) and 283 MiB (Kimi); rows are what is left.
    rows = max(num_tokens * case.experts_per_token, 256)
    assert compiled.memory_analysis().temp_size_in_bytes < rows * (4 * case.inputs + 6 * case.outputs) + 2**21


def test_many_tokens_of_whole_experts_go_by_a_ragged_all_to_all() -> None:
    case = next(case for case in CASES if case.name == "qwen3-235b")
    many, few = (mixture_on_eight(case, EXPERT_PARALLEL, num_tokens, shared_size=None) for num_tokens in (2048, 256))
    assert sorted(re.findall(COLLECTIVES, many.as_text())) == ["all-gather", "ragged-all-to-all"]
    assert re.findall(COLLECTIVES, few.as_text()) == ["all-reduce"]
    assert num_kernels(many) == num_kernels(few) == 2


def mixture_on_eight(case: Case, rules: Rules, num_tokens: int, shared_size: int | None) -> jax.stages.Compiled:
    weight_format = ModelWeightFormat(
        Plain(BFLOAT16), experts=ExpertFormat(packing=None if case.format == "bfloat16" else case.format, backend="mosaic_gpu")
    )
    mesh = make_mesh(range(8), target_devices("h100", 8))

    def build() -> nnx.Module:
        return MixtureOfExperts(case.inputs, case.outputs, routing_of(case), weight_format, shared_size=shared_size)

    return compiled_for(mesh, rules, build, ((num_tokens, case.inputs), BFLOAT16))
