"""The engine's own prefill and decode programs of Llama-3.1-8B compile for GPUs, with the kernels in them and nothing large copied."""

from __future__ import annotations

import pytest

from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.models.registry import read_config
from jaxinfer.models.shapes import model_shape
from tests.aot.conftest import num_kernels
from tests.aot.engine_programs import BFLOAT16, compile_for, large_copies

pytestmark = pytest.mark.aot

NUM_PAGES, CONTEXT = 8192, 8192


@pytest.mark.parametrize("name", ["decode/1", "decode/32", "decode/128", "prefill/512", "prefill/4096"])
def test_llama_3_1_8b(target, name):
    config = read_config(model_shape("llama-3.1-8b"))
    program = compile_for(target, 1, config, MatrixFormat(BFLOAT16), name, num_pages=NUM_PAGES, context=CONTEXT)
    assert program.attention == "mosaic_gpu"
    assert num_kernels(program.compiled) == config.num_layers
    memory, (role, _, size) = program.compiled.memory_analysis(), name.partition("/")
    assert memory.alias_size_in_bytes >= program.pool_bytes == NUM_PAGES * program.spec.page_bytes, "pages are updated where they are"
    # What a row or token needs: a few numbers a word of the vocabulary where it is sampled, a few times the MLP's width otherwise.
    sampled = int(size) if role == "decode" else 32
    activations = 4 * (6 * sampled * config.vocab_size + 3 * int(size) * (2 * config.mlp_size + config.hidden_size))
    assert memory.temp_size_in_bytes < activations + 2**25
    assert not large_copies(program.compiled.as_text(), max(activations, 2**25)), "of a cache or of a layer's weights"


def test_large_copies_are_seen():
    line = "  %x = bf16[1,14336,4096]{2,1,0} dynamic-slice(%a, %b), dynamic_slice_sizes={1,14336,4096}\n  ROOT %copy.1 = pred[8,8]{1,0} copy(%x)"
    assert large_copies(line, 2**25) == ["= bf16[1,14336,4096]{2,1,0} dynamic-slice("]
    assert len(large_copies(line, 64)) == 2
