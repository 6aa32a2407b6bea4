"""Every kernel compiles for the GPUs it is written for, in the shapes of real models."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.mosaic_gpu import paged_attention
from pallas_kernels.span import EVERYTHING, Span
from tests.aot.conftest import num_kernels

pytestmark = pytest.mark.aot
NUM_PAGES = 4096


@pytest.mark.parametrize("batch", [1, 32, 128])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (32, 32, 80), (32, 8, 96), (32, 8, 128), (64, 8, 192), (16, 8, 256)]
)
def test_paged_attention(compile_for, batch, num_heads, num_kv_heads, head_size):
    compiled = compile_paged(compile_for, batch, num_heads, num_kv_heads, head_size)
    assert num_kernels(compiled) == 1
    keys_of_a_layer = NUM_PAGES * num_kv_heads * 16 * head_size * 2
    assert compiled.memory_analysis().temp_size_in_bytes < keys_of_a_layer / 4, "no copy of the pool"


@pytest.mark.parametrize(
    "options", [{"span": Span(window=1024)}, {"span": Span(chunk=8192)}, {"soft_cap": 50.0}, {"pool_is_finite": False}]
)
def test_paged_attention_with(compile_for, options):
    assert num_kernels(compile_paged(compile_for, 8, 32, 8, 128, **options)) == 1


def compile_paged(compile_for, batch, num_heads, num_kv_heads, head_size, *, pool_is_finite=True, span=EVERYTHING, soft_cap=None):
    function = partial(paged_attention, scale=head_size**-0.5, pool_is_finite=pool_is_finite, span=span, soft_cap=soft_cap)
    bfloat16, int32 = jnp.bfloat16, jnp.int32
    return compile_for(
        function,
        ((batch, num_heads, head_size), bfloat16),
        ((2, 2, NUM_PAGES, num_kv_heads, 16, head_size), bfloat16),
        ((), int32),
        ((batch, 256), int32),
        ((batch,), int32),
    )
