"""Expert layers compile for the GPUs that their kernel is written for, in the sizes of real models, and copy no expert."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.layers.matrices import ExpertFormat, MatrixFormat
from jaxinfer.layers.moe import Experts, why_not
from jaxinfer.models.config import Routing
from pallas_kernels.grouped_matmul.cases import CASES, Case
from sharding.mesh import make_mesh
from sharding.partition import named_sharding
from sharding.rules import TENSOR_PARALLEL
from sharding.targets import target_devices
from tests.aot.conftest import num_kernels

pytestmark = pytest.mark.aot

BFLOAT16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize("num_tokens", [4, 2048])
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_kernels_and_no_copy_of_an_expert(case: Case, num_devices: int, num_tokens: int) -> None:
    packing = None if case.format == "bfloat16" else case.format
    form = MatrixFormat(BFLOAT16, experts=ExpertFormat(packing=packing, backend="mosaic_gpu"))
    assert why_not(case.inputs, case.outputs, num_devices, form, BFLOAT16) is None
    mesh = make_mesh(range(num_devices), target_devices("h200", num_devices))
    routing = Routing(case.num_experts, case.experts_per_token, "sigmoid", scales_input=case.experts_per_token == 1)
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(case.inputs, case.outputs, routing, form)))
    flat = dict(nnx.to_flat_state(state))
    arrays = {}
    for path, param in flat.items():
        sharding = named_sharding(mesh, TENSOR_PARALLEL, param.get_metadata()["logical_axes"], param.shape, str(path))
        arrays[path] = jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)

    def run(arrays, x, experts, weights):
        return nnx.merge(graph, nnx.from_flat_state({path: param.replace(arrays[path]) for path, param in flat.items()}))(
            x, experts, weights
        )

    whole = NamedSharding(mesh, PartitionSpec())
    chosen = (num_tokens, case.experts_per_token)
    inputs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        for shape, dtype in (((num_tokens, case.inputs), BFLOAT16), (chosen, jnp.int32), (chosen, jnp.float32))
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(arrays, *inputs).compile()
    assert num_kernels(compiled) == 2
    of_rows = max(math.prod(chosen), 256) * (4 * case.inputs + 6 * case.outputs) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < of_rows + 2**21
