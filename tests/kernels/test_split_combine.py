"""Results of KV splits are combined by their weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.attention import INITIAL_MAX
from pallas_kernels.mosaic.split_combine import combine_splits
from pallas_kernels.mosaic.warpgroup import Warpgroup


@pytest.mark.parametrize(("num_splits", "columns", "dtype"), [(5, 128, jnp.bfloat16), (2, 256, jnp.float32), (3, 64, jnp.float16)])
def test_each_counts_for_what_it_weighs(num_splits, columns, dtype):
    """As many weights as are told apart, and more; some shares, and all of a row's, have nothing. By a kernel, and where it can't by XLA."""
    random = np.random.default_rng(columns)
    out = random.normal(size=(num_splits, 4, 3, columns)).astype(np.float32)
    weight = random.uniform(-40, 40, (num_splits, 4, 8)).astype(np.float32)
    weight[1:, 2], weight[:, 1, 2], weight[..., 3:] = INITIAL_MAX, INITIAL_MAX, np.nan
    found = jax.jit(lambda *shares: combine_splits(Warpgroup(interpreted=True), *shares, dtype))(out, weight)
    factors = np.exp2((weight - weight.max(0))[..., :3, None].astype(np.float64))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, (out * factors).sum(0) / factors.sum(0), rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
