"""ragged_prefill_attention's kernel for GPUs, interpreted on a CPU: what it copies, where, and who waits for whom. What registers hold is
the compiler's and a GPU's to check."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_prefill_attention.mosaic_gpu import Tiling, ragged_prefill_attention
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention as op
from pallas_kernels.span import Span
from tests.kernels.poisoned_pool import LAYER, poisoned_pool


def arguments(starts, cached, new, num_tokens, *, num_heads=2, num_kv_heads=1, head_size=16, page_size=16, dtype=jnp.bfloat16, unused=1):
    """Queries of no request are NaN, and so is all of the pool that no request may read."""
    random = np.random.default_rng(0)
    kv, table = poisoned_pool(random, np.add(cached, new), num_kv_heads, page_size, head_size)
    q = np.full((num_tokens, num_heads, head_size), np.nan, np.float32)
    for start, length in zip(starts, new, strict=True):
        q[start : start + length] = random.standard_normal((length, num_heads, head_size))
    rows = (np.pad(a, (0, unused)).astype(np.int32) for a in (starts, new, np.add(cached, new)))
    return *(jnp.asarray(a, dtype) for a in (q, kv)), jnp.int32(LAYER), jnp.pad(table, ((0, unused), (0, 0))), *map(jnp.asarray, rows)


def check(inputs, tiling, query_tile=32, **options):
    """Interpreted as the reference has it, up to the output's rounding. The output is NaN before."""
    q, kv, *others = inputs
    options = {"scale": 0.3, "query_tile": query_tile, "pool_is_finite": False, **options}
    run = jax.jit(functools.partial(ragged_prefill_attention, tiling=tiling, interpreted=True, **options))
    expected = op(q.astype(jnp.float32), kv.astype(jnp.float32), *others, backend="reference", **options)
    rounding = float(jnp.finfo(q.dtype).eps)
    np.testing.assert_allclose(np.asarray(run(*inputs), np.float32), expected, rtol=2 * rounding, atol=2 * rounding)
    assert np.any(expected)


SEVERAL = {"starts": (32, 96, 0), "cached": (150, 0, 63), "new": (40, 70, 1), "num_tokens": 192}


def test_requests_of_any_length_in_any_order():
    check(arguments(**SEVERAL), Tiling(2, 64, 2))
