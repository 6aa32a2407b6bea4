"""The first layers, one of each kind at least, of the models of the frontier compile for the cards that serve them, at their real sizes: their
kernels are in them, pages are updated where they are, and no cache or weight is copied."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.models.registry import read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ExpertFormat, ModelWeightFormat
from tests.aot.conftest import num_kernels
from tests.aot.engine_programs import BFLOAT16, compile_for, first_layers, large_copies

pytestmark = pytest.mark.aot


@dataclass(frozen=True)
class Case:
    model: str
    card: str
    num_devices: int
    num_layers: int
    num_moe: int  # of these, layers of experts: two products each
    packing: str | None = None


CASES = [
    Case("kimi-k2.5", "h100", 8, 3, 2, "int4"),
    Case("deepseek-v3", "h200", 8, 5, 2, "fp8"),
    Case("llama-4-scout", "h200", 2, 4, 4),
    Case("qwen3-235b-a22b", "h200", 4, 2, 2),
    Case("gemma-3-27b", "h100", 1, 6, 0),
]


@pytest.mark.parametrize("name", ["decode/32", "prefill/2048"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.model, marks=() if index < 2 else pytest.mark.exhaustive) for index, case in enumerate(CASES)]
)
def test_first_layers(case, name):
    config = first_layers(read_config(model_shape(case.model)), case.num_layers)
    weight_format = ModelWeightFormat(Plain(BFLOAT16), experts=ExpertFormat(packing=case.packing, backend="mosaic_gpu"))
    program = compile_for(case.card, case.num_devices, config, weight_format, name, num_pages=2**15, context=32768)
    assert program.attention == "mosaic_gpu"
    assert num_kernels(program.compiled) == case.num_layers + 2 * case.num_moe
    memory = program.compiled.memory_analysis()
    print(f"{case}, {name}: weights {program.weight_bytes / 2**30:.2f} GiB, temporaries {memory.temp_size_in_bytes / 2**20:.0f} MiB")
    assert memory.alias_size_in_bytes >= program.pool_bytes
    assert memory.temp_size_in_bytes < 2**29
    assert not large_copies(program.compiled.as_text(), min(program.pool_bytes, program.largest_weight) // 2)
