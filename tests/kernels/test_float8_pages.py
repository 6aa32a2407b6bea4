"""Pools of float8: every code, what doesn't fit, and attention over codes against attention over their values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.float8_pages import CODES, FLOAT8, LARGEST, is_float8, narrowed, pool_dtype, widened
from pallas_kernels.latent_prefill_attention import op as latents
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention import op
from pallas_kernels.paged_attention.cases import DecodeCase
from pallas_kernels.paged_attention.op import unsupported_reason
from pallas_kernels.ragged_prefill_attention.cases import PrefillCase
from tests.kernels import test_paged_attention, test_ragged_prefill_attention
from tests.kernels.compiled import compiled
from tests.kernels.poisoned_pool import LAYER

paged_attention, latent_prefill_attention = compiled(op.paged_attention), compiled(latents.latent_prefill_attention)
EVERY_CODE = np.arange(256, dtype=np.uint8)


def as_codes(pool):
    """What is NaN is the code of NaN."""
    return jax.lax.bitcast_convert_type(pool.astype(FLOAT8), CODES)


def test_each_code_is_its_value():
    values = EVERY_CODE.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = np.asarray(widened(jnp.asarray(EVERY_CODE)))
    np.testing.assert_array_equal(found[~np.isnan(values)], values[~np.isnan(values)])
    assert np.isnan(values).sum() == 2
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(widened(jnp.asarray(values).astype(FLOAT8)), values)


@pytest.mark.parametrize("dtype", [CODES, FLOAT8])
def test_values_are_rounded_to_the_nearest_and_saturate(dtype):
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 60
    kept = np.asarray(widened(narrowed(jnp.asarray(values), dtype)))
    np.testing.assert_array_equal(kept, values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    odd = jnp.asarray([1e9, -1e9, 449, 465, np.inf, np.nan, 0.0009])
    np.testing.assert_array_equal(widened(narrowed(odd, dtype)), [LARGEST, -LARGEST, LARGEST, LARGEST, 0, 0, 0])
    assert is_float8(dtype)
    assert {pool_dtype("cpu"), pool_dtype("gpu")} == {CODES, FLOAT8}


def test_written_values_are_codes_and_nothing_else_changes():
    pool = jnp.full((2, 2, 3, 1, 4, 16), 7, CODES)
    k, v = jnp.full((1, 1, 16), 1e6), jnp.full((1, 1, 16), -1.5)
    found = np.asarray(write(pool, jnp.int32(1), (k, v), jnp.array([2]), jnp.array([3])))
    assert (found[1, 0, 2, 0, 3] == 0x7E).all()  # the largest, not NaN
    assert (np.asarray(widened(jnp.asarray(found[1, 1, 2, 0, 3]))) == -1.5).all()
    assert (found == 7).sum() == pool.size - 32


@pytest.mark.parametrize("backend", ["xla", "llvm_cpu"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 1, 128), (2, 2, 16)], ids=str)
def test_decode_over_codes_is_attention_over_their_values(backend, heads):
    case = DecodeCase("", *heads, 16, (1, 17, 300, 0))
    q, kv, table, kv_len = test_paged_attention.arguments(case, case.context, 3)
    codes, values = as_codes(kv * 8), jnp.asarray(np.asarray((kv * 8).astype(FLOAT8)).astype(np.float32))
    expected = paged_attention(q, values, jnp.int32(LAYER), table, kv_len, scale=0.02, backend="reference")
    found = paged_attention(q, codes, jnp.int32(LAYER), table, kv_len, scale=0.02, backend=backend)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.any(expected)


@pytest.mark.parametrize("backend", ["xla", "llvm_cpu"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 16)], ids=str)
def test_prefill_over_codes_is_attention_over_their_values(backend, heads):
    case = PrefillCase("", *heads, 8, 96, 32, ((0, 20), (150, 9), (300, 21)))
    q, kv, *others = test_ragged_prefill_attention.arguments(case, 4)
    codes, values = as_codes(kv * 8), jnp.asarray(np.asarray((kv * 8).astype(FLOAT8)).astype(np.float32))
    options = {"scale": 0.02, "query_tile": 32}
    expected = test_ragged_prefill_attention.run(q, values, *others, **options, backend="reference")
    found = test_ragged_prefill_attention.run(q, codes, *others, **options, backend=backend)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.any(expected)


def test_latents_may_be_codes():
    random = np.random.default_rng(5)
    codes = as_codes(jnp.asarray(random.standard_normal((2, 1, 6, 1, 8, 24)) * 5))
    q, up = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((32, 4, 16), (16, 4, 20)))
    rows = jnp.array([[1, 3, 2], [4, 5, 0]]), jnp.array([0, 16]), jnp.array([16, 9]), jnp.array([24, 9])
    options = {"scale": 0.05, "query_tile": 16}
    expected = latent_prefill_attention(q, widened(codes), jnp.int32(1), *rows, up, **options, backend="reference")
    for backend in ("reference", "xla"):
        found = latent_prefill_attention(q, codes, jnp.int32(1), *rows, up, **options, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_which_pools_have_kernels():
    assert unsupported_reason("llvm_cpu", CODES, 64, 16) is None
    assert "float8_e4m3fn pages" in unsupported_reason("llvm_cpu", FLOAT8, 64, 16)
