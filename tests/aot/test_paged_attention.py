"""paged_attention compiles for the GPUs it is written for, in the shapes of real models."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention, paged_attention_and_lse, write_and_attend
from pallas_kernels.paged_attention.mosaic_tiling import tiling_for
from pallas_kernels.span import Span
from tests.aot.conftest import makers, num_kernels

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


@pytest.mark.parametrize("batch", [1, 32])
def test_xla_copies_no_pool_either(compile_for, batch):
    compiled = compile_paged(compile_for, batch, 32, 8, 128, attend=xla.paged_attention)
    assert num_kernels(compiled) == 0
    assert compiled.memory_analysis().temp_size_in_bytes < NUM_PAGES * 8 * 16 * 128 * 2 / 2


@pytest.mark.parametrize(
    "options", [{"span": Span(window=1024)}, {"span": Span(chunk=8192)}, {"soft_cap": 50.0}, {"pool_is_finite": False}]
)
def test_paged_attention_with(compile_for, options):
    assert num_kernels(compile_paged(compile_for, 8, 32, 8, 128, **options)) == 1


@pytest.mark.parametrize("head_size", [64, 128])
def test_paged_attention_over_float8(compile_for, head_size):
    assert num_kernels(compile_paged(compile_for, 8, 32, 8, head_size, dtype=jnp.float8_e4m3fn)) == 1


@pytest.mark.parametrize(
    ("batch", "num_heads", "page_size"), [(1, 16, 64), (1, 128, 64), (64, 128, 64), (32, 64, 8), (32, 64, 16), (32, 64, 128), (1, 16, 256)]
)
def test_paged_attention_over_latents(compile_for, batch, num_heads, page_size):
    """DeepSeek-V3's and Kimi K2's, whole or an eighth of the heads; a device's part of a page, or pages of many devices on one."""
    attend = paged_attention if num_heads == 16 else paged_attention_and_lse
    assert num_kernels(compile_paged(compile_for, batch, num_heads, 1, 576, attend=attend, page_size=page_size, value_size=512)) == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_size", "options"),
    [
        (4, 32, 8, 128, {}),
        (3, 10, 2, 64, {"span": Span(window=1024), "pool_is_finite": False}),  # rows of 15, which no power of two divides
        (8, 80, 8, 128, {"span": Span(chunk=8192)}),  # 80 rows: two tiles
        (2, 64, 1, 576, {"page_size": 64, "value_size": 512}),
        (2, 32, 8, 128, {"dtype": jnp.float8_e4m3fn}),
    ],
)
def test_paged_attention_of_several_tokens(compile_for, num_tokens, num_heads, num_kv_heads, head_size, options):
    compiled = compile_paged(compile_for, 8, num_heads, num_kv_heads, head_size, num_tokens=num_tokens, **options)
    assert num_kernels(compiled) == 1


@pytest.mark.parametrize(
    ("batch", "num_heads", "num_kv_heads", "head_size", "options"),
    [
        (1, 32, 8, 128, {}),
        (128, 32, 8, 128, {"pool_is_finite": False}),
        (32, 9, 3, 64, {"span": Span(window=1024)}),
        (32, 32, 32, 80, {"soft_cap": 50.0}),
        (32, 16, 8, 256, {"dtype": jnp.float16}),
        (8, 128, 1, 128, {}),
    ],
)
def test_one_launch_writes_and_attends(compile_for, batch, num_heads, num_kv_heads, head_size, options):
    dtype = jnp.dtype(options.pop("dtype", jnp.bfloat16))

    def function(*arguments):
        tiling = tiling_for(batch, num_kv_heads, num_heads // num_kv_heads, head_size, 16, 4096, dtype)
        settings = {"pool_is_finite": True, **options, "tiling": replace(tiling, writes=True)}
        return write_and_attend(*arguments, scale=0.1, **settings)

    row, pool = (batch, num_kv_heads, head_size), (2, 2, NUM_PAGES, num_kv_heads, 16, head_size)
    compiled = compile_for(
        function,
        ((batch, num_heads, head_size), dtype),
        *((shape, dtype) for shape in (row, row, pool)),
        *((shape, jnp.int32) for shape in ((), (batch, 256), (batch,), (batch,), (batch,))),
        donate=(3,),
    )
    assert num_kernels(compiled) == 1
    assert makers(compiled, pool) == {"custom-call"}, "nothing else writes to the pool, or copies it"
    assert compiled.memory_analysis().alias_size_in_bytes >= math.prod(pool) * 2


def compile_paged(
    compile_for,
    batch,
    num_heads,
    num_kv_heads,
    head_size,
    *,
    attend=paged_attention,
    num_tokens=None,
    page_size=16,
    dtype=jnp.bfloat16,
    pool_is_finite=True,
    **options,
):
    def function(q, kv_pages, scales, *others):
        kv_scales = scales if dtype == jnp.float8_e4m3fn else None
        return attend(q, kv_pages, *others, scale=0.1, pool_is_finite=pool_is_finite, kv_scales=kv_scales, **options)

    num_sides = 1 if "value_size" in options else 2
    return compile_for(
        function,
        ((batch, *([num_tokens] if num_tokens else []), num_heads, head_size), jnp.bfloat16),
        ((2, num_sides, NUM_PAGES, num_kv_heads, page_size, head_size), dtype),
        ((2, num_sides, num_kv_heads), jnp.float32),
        ((), jnp.int32),
        ((batch, 256), jnp.int32),
        ((batch,), jnp.int32),
    )
