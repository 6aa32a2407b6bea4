"""grouped_matmul compiles for the GPUs that it is written for, in the shapes of real models, with all their experts."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.cases import CASES, ExpertsCase
from pallas_kernels.grouped_matmul.formats import Fp8, Int4
from pallas_kernels.grouped_matmul.lossless import LosslessWeights
from pallas_kernels.grouped_matmul.mosaic_gpu import grouped_matmul
from tests.aot.conftest import num_kernels

pytestmark = pytest.mark.aot


def arrays_of(case: ExpertsCase, inputs: int, outputs: int) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    """Shapes and types of the experts' matrices."""
    tiles = (case.num_experts, outputs // 128, inputs // 128)
    if case.format == "int4":
        return [((*tiles, 128, 16), jnp.int32), ((*tiles, 2, 256), jnp.bfloat16)]
    if case.format == "fp8":
        return [((*tiles, 256, 16), jnp.int32), ((*tiles, 32), jnp.float32)]
    if case.format == "lossless":
        return [((*tiles, 386, 16), jnp.int32)]
    return [((case.num_experts, inputs, outputs), jnp.bfloat16)]


@pytest.mark.parametrize("num_tokens", [1, 67, 8192])
@pytest.mark.parametrize("product", ["up", "down"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_kernel_and_no_weight_beside_the_packed_ones(compile_for, case, product, num_tokens):
    inputs, outputs = (case.inputs, case.outputs) if product == "up" else (case.outputs, case.inputs)
    compiled = compile_grouped(compile_for, case, inputs, outputs, num_tokens)
    assert num_kernels(compiled) == 1
    num_rows = num_tokens * case.experts_per_token
    rows_of_a_tile = 256 * (inputs + outputs) * 2  # fewer rows than a tile has are copied into one
    assert compiled.memory_analysis().temp_size_in_bytes < rows_of_a_tile + 64 * (num_rows + case.num_experts), (
        "a copy of rows or of weights"
    )


def compile_grouped(compile_for, case: ExpertsCase, inputs: int, outputs: int, num_tokens: int):
    def function(x, group_sizes, *weights):
        packed = {"int4": Int4, "fp8": Fp8, "lossless": LosslessWeights}.get(case.format)
        return grouped_matmul(x, packed(*weights) if packed else weights[0], group_sizes)

    x, group_sizes = ((num_tokens * case.experts_per_token, inputs), jnp.bfloat16), ((case.num_experts,), jnp.int32)
    return compile_for(function, x, group_sizes, *arrays_of(case, inputs, outputs))
