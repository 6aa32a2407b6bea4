"""Combines the results of KV splits that several blocks attended over (Flash-Decoding,
pytorch.org/blog/flash-decoding)."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.mosaic.warpgroup import Warpgroup, compiler_params

_THREADS = 128  # of a warpgroup: all process equally many columns


def combine_splits(
    warpgroup: Warpgroup, out: Float[Array, "S X G V"], weight: Float[Array, "S X W"], dtype: jnp.dtype
) -> Float[Array, "X G V"]:
    """The weighted mean of the results of S splits. A split's weight is 2 to `weight`, the log2 of its softmax's
    denominator; of W weights the first G count."""
    num_groups, group, columns = out.shape[1:]
    if columns % _THREADS:
        return _combine_by_xla(out, weight[..., :group]).astype(dtype)
    kernel = warpgroup.kernel(
        _kernel,
        "combine_splits",
        out_type=jax.ShapeDtypeStruct((num_groups, group, columns), dtype),
        grid=(num_groups, group),
        grid_names=("group", "row"),
        compiler_params=compiler_params(approx_math=True),
    )
    return kernel(out, weight)


def _kernel(out: Any, weight: Any, result: Any) -> None:
    """One row. XLA would launch three kernels for it."""
    group, row = lax.axis_index("group"), lax.axis_index("row")
    weights = [weight[split, group, row] for split in range(len(out))]
    top = reduce(jnp.maximum, weights)
    factors = [jnp.exp2(weight - top) for weight in weights]
    total = sum(out[split, group, row].astype(jnp.float32) * factor for split, factor in enumerate(factors))
    result[group, row] = (total / sum(factors)).astype(result.dtype)


def _combine_by_xla(out: Float[Array, "S X G V"], weight: Float[Array, "S X G"]) -> Float[Array, "X G V"]:
    factors = jnp.exp2(weight - weight.max(0))
    return (out.astype(jnp.float32) * (factors / factors.sum(0))[..., None]).sum(0)
