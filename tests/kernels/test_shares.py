"""Shares of a context put together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.attention import LOWEST
from pallas_kernels.mosaic.shares import together
from pallas_kernels.mosaic.warpgroup import Warpgroup


@pytest.mark.parametrize(("num_shares", "columns", "dtype"), [(5, 128, jnp.bfloat16), (2, 256, jnp.float32), (3, 64, jnp.float16)])
def test_each_counts_for_what_it_weighs(num_shares, columns, dtype):
    """As many weights as are told apart, and more; some shares, and all of a row's, have nothing. By a kernel, and where it can't by XLA."""
    random = np.random.default_rng(columns)
    out = random.normal(size=(num_shares, 4, 3, columns)).astype(np.float32)
    weight = random.uniform(-40, 40, (num_shares, 4, 8)).astype(np.float32)
    weight[1:, 2], weight[:, 1, 2], weight[..., 3:] = LOWEST, LOWEST, np.nan
    found = jax.jit(lambda *shares: together(Warpgroup(interpreted=True), *shares, dtype))(out, weight)
    factors = np.exp2((weight - weight.max(0))[..., :3, None].astype(np.float64))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, (out * factors).sum(0) / factors.sum(0), rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
