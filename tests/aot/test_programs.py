"""The engine's own prefill and decode programs of Llama-3.1-8B compile for GPUs, with the kernels in them and nothing large copied."""

from __future__ import annotations

import math
import re

import jax.numpy as jnp
import pytest

from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.models.registry import read_config
from jaxinfer.plan import choose_attention
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.runtime.compilation import compile_program
from jaxinfer.runtime.template import make_template
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL
from sharding.targets import target_devices
from tests.aot.conftest import num_kernels

pytestmark = pytest.mark.aot

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": [128001, 128008, 128009],
}
NUM_PAGES, CONTEXT = 8192, 8192
BFLOAT16 = jnp.dtype("bfloat16")
_ARRAY = re.compile(r"= (pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]+)\]\S* (copy|dynamic-slice|concatenate|transpose)\(")


@pytest.mark.parametrize("name", ["decode/1", "decode/32", "decode/128", "prefill/512", "prefill/4096"])
def test_llama_3_1_8b(target, name):
    config = read_config(LLAMA_3_1_8B)
    template = make_template(config, MatrixFormat(BFLOAT16))
    mesh = make_mesh((0,), target_devices(target, 1))
    spec = PageSpec(config.num_layers, config.num_kv_heads, config.head_size, 16, BFLOAT16.itemsize)
    pool = PagePool(spec, NUM_PAGES, BFLOAT16, mesh, TENSOR_PARALLEL)
    role, _, size = name.partition("/")
    attention = choose_attention(role, "auto", mesh.devices.flat[0], BFLOAT16, config.num_heads // config.num_kv_heads, spec, (int(size),))
    assert attention == "mosaic_gpu"
    runner = {"decode": DecodeRunner, "prefill": PrefillRunner}[role]
    programs = {p.name: p for p in runner(template, mesh, TENSOR_PARALLEL, pool, (int(size),), CONTEXT, attention).programs()}
    compiled = compile_program(programs[name])

    assert num_kernels(compiled) == config.num_layers
    memory, pool_bytes = compiled.memory_analysis(), NUM_PAGES * spec.page_bytes
    assert memory.alias_size_in_bytes >= pool_bytes, "pages are updated where they are"
    # What a row or token needs: a few numbers a word of the vocabulary where it is sampled, a few times the MLP's width otherwise.
    sampled = int(size) if role == "decode" else 32
    activations = 4 * (6 * sampled * config.vocab_size + 3 * int(size) * (2 * config.mlp_size + config.hidden_size))
    assert memory.temp_size_in_bytes < activations + 2**25
    assert not large_copies(compiled.as_text(), max(activations, 2**25)), "of a cache or of a layer's weights"


def large_copies(program: str, size: int) -> list[str]:
    """What a program moves about without computing anything, of at least so many bytes."""
    found = []
    for match in _ARRAY.finditer(program):
        bits, dims = int(match[2] or 8), [int(d) for d in match[3].split(",")]
        if math.prod(dims) * bits // 8 >= size:
            found.append(match[0])
    return found


def test_large_copies_are_seen():
    line = "  %x = bf16[1,14336,4096]{2,1,0} dynamic-slice(%a, %b), dynamic_slice_sizes={1,14336,4096}\n  ROOT %copy.1 = pred[8,8]{1,0} copy(%x)"
    assert large_copies(line, 2**25) == ["= bf16[1,14336,4096]{2,1,0} dynamic-slice("]
    assert len(large_copies(line, 64)) == 2
