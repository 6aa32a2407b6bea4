"""Writing to a page pool: each token at its place, nothing else touched, and nothing in it that is not a finite number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv_cache.pages import write

SHAPE = (3, 2, 6, 2, 4, 8)  # layers, keys and values, pages, KV heads, tokens a page, head size
run = jax.jit(write)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_each_token_is_at_its_place_of_its_layer_and_all_else_is_as_it_was(num_tokens):
    random = np.random.default_rng(num_tokens)
    before = random.standard_normal(SHAPE, np.float32)
    k, v = random.standard_normal((2, num_tokens, 2, 8), np.float32)
    places = random.permutation([(page, offset) for page in range(6) for offset in range(4)])[:num_tokens].astype(np.int32)
    expected = before.copy()
    for token, (page, offset) in enumerate(places):
        expected[1, 0, page, :, offset], expected[1, 1, page, :, offset] = k[token], v[token]
    found = run(jnp.asarray(before), jnp.int32(1), (k, v), places[:, 0], places[:, 1])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_what_is_no_finite_number_in_the_pools_type_is_stored_as_zero(bad, dtype):
    k = np.ones((2, 2, 8), np.float32)
    k[0, 1, 3] = bad  # float32's largest number is infinite in bfloat16
    found = run(jnp.zeros(SHAPE, dtype), jnp.int32(0), (k, -k), np.array([2, 4], np.int32), np.array([0, 3], np.int32))
    assert np.isfinite(np.asarray(found, np.float32)).all()
    fits = bool(jnp.isfinite(jnp.asarray(bad, dtype)))
    np.testing.assert_array_equal(np.asarray(found, np.float32)[0, :, 2, 1, 0, 3], [bad, -bad] if fits else [0, 0])
    np.testing.assert_array_equal(np.asarray(found, np.float32)[0, :, 4, :, 3], [np.ones((2, 8)), -np.ones((2, 8))])
