"""Programs of models whose KV heads eight cards don't divide: compiled for them, with the kernels in them, a KV head a card."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_transfer.page_moves import gather_programs, scatter_programs
from jaxinfer.models.registry import read_config
from jaxinfer.programs.compilation import compile_program
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL
from sharding.targets import target_devices
from tests.aot.conftest import num_kernels
from tests.aot.engine_programs import BFLOAT16, compile_for, first_layers, large_copies

pytestmark = pytest.mark.aot

NUM_PAGES, CONTEXT = 16384, 8192


@pytest.mark.parametrize("name", ["decode/32", "prefill/512"])
@pytest.mark.parametrize(("model", "more_kv"), [("qwen3-235b-a22b", 8 / 4), ("smollm2-135m", 8 / 3)])
def test_the_engines_programs_on_eight_cards(model, more_kv, name):
    config = first_layers(read_config(model_shape(model)), 2)
    program = compile_for("h100", 8, config, ModelWeightFormat(Plain(BFLOAT16)), name, num_pages=NUM_PAGES, context=CONTEXT)
    assert program.attention == "mosaic_gpu"
    assert num_kernels(program.compiled) == config.num_layers
    assert program.pool_bytes == NUM_PAGES * program.spec.page_bytes * more_kv / 8
    assert program.compiled.memory_analysis().alias_size_in_bytes >= program.pool_bytes
    assert not large_copies(program.compiled.as_text(), program.pool_bytes // 4), "of a layer's keys or values"


def test_moves_of_pages_that_eight_cards_have_copies_of():
    config = read_config(model_shape("qwen3-235b-a22b")).on_devices(8)
    spec = PageSpec.of(config.with_own_heads(), 16, 2)
    mesh = make_mesh(range(8), target_devices("h100", 8))
    pool = PagePool(spec, NUM_PAGES, jnp.dtype(BFLOAT16), mesh, TENSOR_PARALLEL, config.heads)
    *_, gather = gather_programs("pages", pool)
    *_, scatter = scatter_programs("pages", pool)
    moved = 32 * spec.page_bytes
    out = compile_program(gather).memory_analysis()
    assert out is not None and out.output_size_in_bytes == moved, "each of the model's heads once"
    compiled = compile_program(scatter)
    assert not [line for line in compiled.as_text().splitlines() if "all-gather" in line or "all-to-all" in line or "all-reduce" in line]
    within = compiled.memory_analysis()
    assert within is not None and within.alias_size_in_bytes == pool.device_bytes
