"""The engine's own prefill and decode programs of Llama-3.1-8B compile for GPUs, with the kernels in them and nothing large copied."""

from __future__ import annotations

import re

import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.models.registry import read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.tiled import Tiled
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.paged_attention import mosaic_tiling
from sharding.rules import TENSOR_PARALLEL
from tests.aot.conftest import launches, makers, num_kernels
from tests.aot.engine_programs import BFLOAT16, EngineProgram, compile_for, compile_for_several_tokens, first_layers, large_copies

pytestmark = pytest.mark.aot

NUM_PAGES, CONTEXT = 8192, 8192


@pytest.mark.parametrize("num_layers", [4, 32])  # all of them take minutes to compile
@pytest.mark.parametrize("name", ["decode/1", "decode/32", "decode/128", "prefill/512", "prefill/4096"])
def test_llama_3_1_8b(target, name, num_layers):
    config = first_layers(read_config(model_shape("llama-3.1-8b")), num_layers)
    program = compile_for(target, 1, config, ModelWeightFormat(Plain(BFLOAT16)), name, num_pages=NUM_PAGES, context=CONTEXT)
    assert program.attention == "mosaic_gpu"
    assert num_kernels(program.compiled) == config.num_layers
    memory, (role, _, size) = program.compiled.memory_analysis(), name.partition("/")
    assert memory.alias_size_in_bytes >= program.pool_bytes == NUM_PAGES * program.spec.page_bytes, "pages are updated where they are"
    # What a row or token needs: a few numbers a word of the vocabulary where it is sampled, a few times the MLP's width otherwise.
    sampled = int(size) if role == "decode" else 0
    activations = 4 * (6 * sampled * config.vocab_size + 3 * int(size) * (2 * config.mlp_size + config.hidden_size))
    assert memory.temp_size_in_bytes < activations + 2**25
    assert not large_copies(program.compiled.as_text(), max(activations, 2**25)), "of a cache or of a layer's weights"
    assert not re.search(r" (while|sort)\(", program.compiled.as_text()), (
        "XLA makes no CUDA graph of what has a loop, or sorts by a library"
    )
    if role == "decode":
        # Products 4, norms and what is added before them 4, rotations and new keys 2, attention 1, the MLP's activation 1. Of one row the
        # shares of its context are put together; of 128 for an H100 XLA adds up a product's shares before it rotates.
        a_layer = 13 if size == "1" or (target, size) == ("h100", "128") else 12
        assert launches(program.compiled) <= a_layer * config.num_layers + 20


@pytest.mark.parametrize(("name", "num_devices"), [("decode/32", 1), ("decode/8", 2), ("prefill/512", 1)])
def test_lossless_linear_layers(target, name, num_devices):
    """A step of few rows reads them packed: a kernel for each product, beside attention's. One of many rows expands a layer at a time."""
    config = first_layers(read_config(model_shape("llama-3.1-8b")), 2)
    matrices = Tiled(splits=tuple((axis, num_devices) for axis in TENSOR_PARALLEL))
    program = compile_for(target, num_devices, config, ModelWeightFormat(matrices), name, num_pages=NUM_PAGES, context=CONTEXT)
    is_decode = name.startswith("decode")
    assert num_kernels(program.compiled) == (5 if is_decode else 1) * config.num_layers
    memory = program.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= program.pool_bytes, "pages are updated where they are"
    expanded = 2 * 2 * config.mlp_size * config.hidden_size // num_devices
    size = int(name.rpartition("/")[2])
    activations = 4 * (6 * size * config.vocab_size if is_decode else 3 * size * (2 * config.mlp_size + config.hidden_size))
    assert memory.temp_size_in_bytes < activations + 2**25 + (0 if is_decode else 2 * expanded)
    if is_decode:
        assert not large_copies(program.compiled.as_text(), max(activations, 2**25)), "of a layer's weights"
        assert launches(program.compiled) <= 13 * config.num_layers + 20


@pytest.mark.parametrize(("model", "num_devices"), [("llama-3.1-8b", 1), ("deepseek-v3", 2)])
def test_a_decode_step_of_four_tokens_a_row(target, model, num_devices):
    """Once over heads and once over latents that two cards share: the kernels are in it, and pages stay where they are."""
    config = first_layers(read_config(model_shape(model)), 1)
    program = compile_for_several_tokens(target, num_devices, config, 32, 4, num_pages=NUM_PAGES, context=CONTEXT)
    assert program.attention == "mosaic_gpu"
    assert num_kernels(program.compiled) >= config.num_layers
    assert program.compiled.memory_analysis().alias_size_in_bytes >= program.pool_bytes


@pytest.mark.parametrize("name", ["decode/1", "decode/128"])
def test_one_launch_a_layer_writes_and_attends_where_the_cards_record_says_so(target, name, monkeypatch):
    """The pool goes through each layer's launch, which writes to it where it is, and nothing else does."""
    config = first_layers(read_config(model_shape("llama-3.1-8b")), 4)
    program = _compiled_by_record(monkeypatch, target, config, name, writes=True)
    assert num_kernels(program.compiled) == config.num_layers
    assert makers(program.compiled, _pool_shape(program)) == {"custom-call"}
    assert program.compiled.memory_analysis().alias_size_in_bytes >= program.pool_bytes
    assert program.compiled.memory_analysis().temp_size_in_bytes < program.pool_bytes / 8


def test_that_is_a_launch_less_a_layer(target, monkeypatch):
    """Else XLA writes, in the launch that also rotates the keys; what is then left of that goes along with the queries."""
    config, found = first_layers(read_config(model_shape("llama-3.1-8b")), 2), {}
    for writes in (False, True):
        program = _compiled_by_record(monkeypatch, target, config, "decode/1", writes=writes)
        assert ("fusion" in makers(program.compiled, _pool_shape(program))) is not writes
        found[writes] = launches(program.compiled)
    assert found[False] - found[True] >= config.num_layers - 1, "one of all layers finds where the pages are"


def _compiled_by_record(monkeypatch, target: str, config: ArchitectureConfig, name: str, *, writes: bool) -> EngineProgram:
    record = {"tokens": 64, "stages": 6, "splits": 1, "writes": writes}
    monkeypatch.setattr(mosaic_tiling, "tuned_tiling", lambda op, _: record if op == "write_and_attend" else None)
    return compile_for(target, 1, config, ModelWeightFormat(Plain(BFLOAT16)), name, num_pages=NUM_PAGES, context=CONTEXT)


def _pool_shape(program: EngineProgram) -> tuple[int, ...]:
    spec = program.spec
    return spec.num_layers, 2, NUM_PAGES, spec.num_kv_heads, spec.page_size, spec.head_size


def test_large_copies_are_seen():
    line = "  %x = bf16[1,14336,4096]{2,1,0} dynamic-slice(%a, %b), dynamic_slice_sizes={1,14336,4096}\n  ROOT %copy.1 = pred[8,8]{1,0} copy(%x)"
    assert large_copies(line, 2**25) == ["= bf16[1,14336,4096]{2,1,0} dynamic-slice("]
    assert len(large_copies(line, 64)) == 2
