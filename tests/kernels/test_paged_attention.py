"""paged_attention: every way to run it against the reference, and the reference against plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.op import paged_attention
from tests.kernels.poisoned_pool import LAYER, poisoned_pool


@functools.partial(jax.jit, static_argnames=("scale", "backend", "pool_is_finite"))
def run(q, kv, *others, **options):
    return paged_attention(q, kv, LAYER, *others, **options)


def arguments(case: Case, context: tuple[int, ...], seed: int, dtype: jnp.dtype = jnp.float32):
    random = np.random.default_rng(seed)
    kv, table = poisoned_pool(random, context, case.num_kv_heads, case.page_size, case.head_size)
    q = random.standard_normal((len(context), case.num_heads, case.head_size), np.float32)
    return *(jnp.asarray(a, dtype) for a in (q, kv)), jnp.asarray(table), jnp.asarray(context, jnp.int32)


def plain(q, kv, table, kv_len, scale):
    """One request and one head at a time, in float64."""
    out = np.zeros(q.shape)
    num_kv_heads, page_size = kv.shape[3:5]
    for row, length in enumerate(kv_len):
        places = [(table[row, p // page_size], p % page_size) for p in range(length)]
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // num_kv_heads)
            keys, values = (np.array([pool[page, kv_head, place] for page, place in places], np.float64) for pool in kv[LAYER])
            scores = keys @ q[row, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values
    return out


def test_the_reference_is_attention():
    case = Case("small", 4, 2, 8, 4, (1, 4, 5, 11))
    q, kv, table, kv_len = arguments(case, case.context, 0)
    out = run(q, kv, table, kv_len, scale=0.3, backend="reference")
    np.testing.assert_allclose(out, plain(*map(np.asarray, (q, kv, table, kv_len)), 0.3), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_is_the_reference_on_the_shapes_of_real_models(case):
    inputs = arguments(case, case.context, 1)
    out = {backend: run(*inputs, scale=case.head_size**-0.5, backend=backend) for backend in ("xla", "reference")}
    np.testing.assert_allclose(out["xla"], out["reference"], atol=2e-5)


def test_xla_is_the_reference_whatever_the_lengths():
    case, random = Case("ragged", 6, 2, 16, 8, ()), np.random.default_rng(2)
    for seed in range(12):
        # The longest is always there, so that all seeds share one program.
        context = (*random.integers(1, 300, 6).tolist(), 300)
        q, kv, table, kv_len = arguments(case, tuple(random.permutation(context).tolist()), seed)
        pages = -kv.shape[2] % 300  # nor does the pool's size differ
        kv = jnp.pad(kv, ((0, 0), (0, 0), (0, pages), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan)
        out = {backend: run(q, kv, table, kv_len, scale=0.25, backend=backend) for backend in ("xla", "reference")}
        np.testing.assert_allclose(out["xla"], out["reference"], atol=2e-5)


def test_bfloat16_pools_are_summed_in_float32():
    case = CASES[0]
    q, kv, table, kv_len = arguments(case, case.context, 3, jnp.bfloat16)
    out = run(q, kv, table, kv_len, scale=0.125, backend="xla")
    assert out.dtype == jnp.bfloat16
    wide = run(*(a.astype(jnp.float32) for a in (q, kv)), table, kv_len, scale=0.125, backend="reference")
    np.testing.assert_allclose(out.astype(jnp.float32), wide, rtol=2**-8, atol=2**-12)  # rounded once, at the end


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_where_the_pool_is_promised_finite_its_unused_places_may_hold_any_number(backend):
    case = CASES[0]
    q, kv, table, kv_len = arguments(case, case.context, 6)
    expected = run(q, kv, table, kv_len, scale=0.125, backend="reference")
    kv = jnp.nan_to_num(kv, nan=3e38)
    out = run(q, kv, table, kv_len, scale=0.125, backend=backend, pool_is_finite=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(run(q, kv, table, kv_len.at[2].set(0), scale=0.125, backend=backend, pool_is_finite=True)[2], 0)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_rows_without_context_come_out_as_zeros(backend):
    case = CASES[2]
    q, kv, table, kv_len = arguments(case, (5, 64), 4)
    one = run(q, kv, table, kv_len.at[0].set(0), scale=0.1, backend=backend)
    np.testing.assert_array_equal(one[0], 0)
    assert np.isfinite(one).all() and np.any(one[1])
    np.testing.assert_array_equal(run(q, kv, table, jnp.zeros_like(kv_len), scale=0.1, backend=backend), 0)


def test_shapes_that_do_not_fit_are_refused_by_name():
    q, kv, table, kv_len = arguments(CASES[2], (5, 64), 5)
    with pytest.raises(ValueError, match=r"kv_pages .* \[L, 2, P, K, G, H\]"):
        paged_attention(q, kv[:, :1], LAYER, table, kv_len, scale=1.0)
    with pytest.raises(ValueError, match="N a multiple of K"):
        paged_attention(q[:, :3], kv, LAYER, table, kv_len, scale=1.0)
    with pytest.raises(ValueError, match="with the same H"):
        paged_attention(q[:, :, :32], kv, LAYER, table, kv_len, scale=1.0)
    with pytest.raises(ValueError, match="must have q's 2 rows"):
        paged_attention(q, kv, LAYER, table, kv_len[:1], scale=1.0)
