"""The kernel compiles for the GPUs it is written for, in the shapes of real models."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import pytest

from pallas_kernels.ragged_prefill_attention.mosaic_gpu import ragged_prefill_attention
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.aot.conftest import num_kernels

pytestmark = pytest.mark.aot
NUM_PAGES, NUM_ROWS = 4096, 8


@pytest.mark.parametrize("num_tokens", [512, 8192])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (32, 32, 80), (32, 8, 96), (32, 8, 128), (64, 8, 192), (16, 8, 256)]
)
def test_shapes_of_models(compile_for, num_tokens, num_heads, num_kv_heads, head_size):
    compiled = compile_ragged(compile_for, num_tokens, num_heads, num_kv_heads, head_size)
    assert num_kernels(compiled) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 2**16, "no copy of the pool, of the queries or of the output"


@pytest.mark.parametrize("num_tokens", [32, 128])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "options"),
    [(32, 8, 128, {}), (9, 3, 64, {"pool_is_finite": False}), (16, 8, 256, {"span": Span(window=1024), "soft_cap": 50.0}), (4, 1, 128, {})],
)
def test_kv_splits_of_long_contexts(compile_for, card, num_tokens, num_heads, num_kv_heads, head_size, options):
    compiled = compile_ragged(compile_for, num_tokens, num_heads, num_kv_heads, head_size, **options)
    assert num_kernels(compiled) == 1
    q = num_tokens * num_heads * head_size * 2
    most = card.multiprocessors // 8  # of H100: 16
    assert 2 * q < compiled.memory_analysis().temp_size_in_bytes < (most + 1.5) * q, (
        "a result of each of 2 or more shares, and what they weigh"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"span": Span(window=1024), "soft_cap": 50.0, "head_size": 256},
        {"span": Span(chunk=8192)},
        {"pool_is_finite": False},
        {"pool_is_finite": False, "span": Span(window=1024), "head_size": 256},
        {"query_tile": 8, "page_size": 8},
        {"page_size": 256},
        {"dtype": jnp.float16},
    ],
)
def test_options(compile_for, options):
    options = {"head_size": 128, **options}
    assert num_kernels(compile_ragged(compile_for, 512, 32, 8, **options)) == 1


def compile_ragged(
    compile_for,
    num_tokens,
    num_heads,
    num_kv_heads,
    head_size,
    *,
    query_tile=32,
    pool_is_finite=True,
    span=FULL_ATTENTION,
    soft_cap=None,
    page_size=16,
    dtype=jnp.bfloat16,
):
    options = {"query_tile": query_tile, "pool_is_finite": pool_is_finite, "span": span, "soft_cap": soft_cap}
    row = ((NUM_ROWS,), jnp.int32)
    return compile_for(
        partial(ragged_prefill_attention, scale=head_size**-0.5, **options),
        ((num_tokens, num_heads, head_size), dtype),
        ((2, 2, NUM_PAGES, num_kv_heads, page_size, head_size), dtype),
        ((), jnp.int32),
        ((NUM_ROWS, 8192 // page_size), jnp.int32),
        row,
        row,
        row,
    )
