"""Multi-head latent attention in DeepSeek-V3's sizes, compiled for GPUs: what it holds, and that no weight and no pool is copied."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.layers.latent_attention import absorbed
from jaxinfer.models.registry import read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention
from tests.aot.conftest import Compile, num_kernels
from tests.aot.engine_programs import BFLOAT16, first_layers, large_copies
from tests.aot.engine_programs import compile_for as compile_for_cards

pytestmark = pytest.mark.aot

MB = 10**6


@pytest.mark.parametrize(("num_heads", "num_tokens", "most"), [(128, 4096, 560 * MB), (16, 8192, 115 * MB), (16, 32, 45 * MB)])
def test_the_kernel_holds_a_run_of_context_expanded_and_no_copy_of_it(compile_for, num_heads, num_tokens, most):
    """What a run is expanded to, what is found there, and what was found before; whatever the pool's size and contexts' lengths."""
    few, many = (compile_latents(compile_for, num_heads, num_tokens, num_pages, num_pages // 10) for num_pages in (10_000, 100_000))
    assert num_kernels(many) == 1
    assert not large_copies(many.as_text(), 2**22)
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    print(f"{num_heads} heads, {num_tokens} tokens: temporaries {temporaries[1] / MB:.0f} MB")
    assert temporaries[1] < most
    assert abs(temporaries[1] - temporaries[0]) < MB


@pytest.mark.parametrize(("num_heads", "most"), [(128, 900 * MB), (16, 115 * MB)], ids=["one-device", "one-of-eight"])
def test_prefill_of_4096_tokens_by_xla_holds_what_its_docstring_says(compile_for, num_heads, most):
    few, many = (
        compile_latents(compile_for, num_heads, 4096, num_pages, num_pages // 10, "xla").memory_analysis().temp_size_in_bytes
        for num_pages in (1_000, 100_000)
    )
    assert few < most
    assert abs(many - few) < MB


def compile_latents(
    compile_for: Compile, num_heads: int, num_tokens: int, num_pages: int, row_pages: int, backend: str = "mosaic_gpu"
) -> jax.stages.Compiled:
    """Prefill of eight requests whose pages are so many at most."""
    shapes = [((num_tokens, num_heads, 192), jnp.bfloat16), ((2, 1, num_pages, 1, 16, 576), jnp.bfloat16), ((), jnp.int32)]
    shapes += [((8, row_pages), jnp.int32), *[((8,), jnp.int32)] * 3, ((512, num_heads, 256), jnp.bfloat16)]
    options = {"scale": 0.1, "query_tile": 32, "pool_is_finite": True, "backend": backend}
    return compile_for(partial(latent_prefill_attention, **options), *shapes)


@pytest.mark.parametrize("role", ["decode/32", "prefill/2048"])
def test_cards_that_share_latents_out_hold_little_more(role):
    """Kimi K2.5 on eight: whatever the size of the pool, what one card's attention needs beside it stays small, and no page is copied."""
    config = first_layers(read_config(model_shape("kimi-k2.5")), 1)
    few, many = (
        compile_for_cards("h100", 8, config, ModelWeightFormat(Plain(BFLOAT16)), role, num_pages=n, context=32768) for n in (2**10, 2**15)
    )
    assert many.spec.page_size == 128
    assert many.pool_bytes == 2**15 * 16 * 576 * 2
    assert few.attention == many.attention == "mosaic_gpu"
    temporaries = [program.compiled.memory_analysis().temp_size_in_bytes for program in (few, many)]
    print(f"{role}: temporaries {temporaries[1] / MB:.1f} MB")
    assert abs(temporaries[1] - temporaries[0]) < MB
    assert many.compiled.memory_analysis().alias_size_in_bytes >= many.pool_bytes
    assert not large_copies(many.compiled.as_text(), many.pool_bytes // 8)


def test_decode_absorbs_without_a_copy_of_what_it_absorbs(compile_for):
    """`up` lies as checkpoints have it, a matrix a head, and is read where it lies; its slices are not copies."""

    def decode(q, up):
        return absorbed(q, jnp.transpose(up, (2, 0, 1)), 576, lambda queries: queries[..., :512] * 2)

    compiled = compile_for(decode, ((32, 128, 192), jnp.bfloat16), ((128, 256, 512), jnp.bfloat16))
    up_bytes = 128 * 256 * 512 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < up_bytes / 2
    assert compiled.memory_analysis().argument_size_in_bytes >= up_bytes
