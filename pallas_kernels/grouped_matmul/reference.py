"""grouped_matmul in plain jnp, the specification: every row times every expert. Slow, for tests."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.formats import Weights, dequantise


def grouped_matmul(x: Float[Array, "T D"], weights: Weights, group_sizes: Int[Array, " E"]) -> Float[Array, "T F"]:
    """See op.py."""
    matrices = dequantise(weights)
    rows = x.astype(matrices.dtype).astype(jnp.float32)
    products = jnp.einsum("td,edf->etf", rows, matrices.astype(jnp.float32), precision="highest")
    owner = jnp.repeat(jnp.arange(len(group_sizes) + 1), jnp.append(group_sizes, len(x)), total_repeat_length=len(x))
    out = jnp.zeros(products.shape[1:])
    for expert in range(len(group_sizes)):
        out = jnp.where(owner[:, None] == expert, products[expert], out)
    return out.astype(x.dtype)
