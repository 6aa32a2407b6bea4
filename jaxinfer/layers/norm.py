"""Normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.linear import weight


class RMSNorm(nnx.Module):
    """Root mean square norm (arXiv:1910.07467), computed in float32 whatever x's type."""

    def __init__(self, size: int, epsilon: float, dtype: jnp.dtype) -> None:
        self.epsilon = epsilon
        self.scale = weight((size,), ("embed",), dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * self.scale[...].astype(x.dtype)
