"""Normalisation."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.matrices import MatrixFormat, weight


class RMSNorm(nnx.Module):
    """Root mean square norm (arXiv:1910.07467), computed in float32 whatever x's type. `heads`: their axis and number, where all of a
    token's are normalised as one, `[T, N, H]`."""

    def __init__(self, size: int, epsilon: float, form: MatrixFormat, heads: Mapping[str, int] | None = None) -> None:
        axes = {**(heads or {}), "embed": size}
        self.epsilon, self.dims = epsilon, tuple(range(-len(axes), 0))
        self.scale = weight(tuple(axes.values()), tuple(axes), form.vector_dtype)

    def normalised(self, x: Float[Array, "T ... D"]) -> Float[Array, "T ... D"]:
        """float32, not scaled yet."""
        wide = x.astype(jnp.float32)
        return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=self.dims, keepdims=True) + self.epsilon)

    def __call__(self, x: Float[Array, "T ... D"]) -> Float[Array, "T ... D"]:
        return self.normalised(x).astype(x.dtype) * self.scale[...].astype(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """Gemma's: the scale is 1 more than its parameter, and multiplies in float32."""

    def __call__(self, x: Float[Array, "T ... D"]) -> Float[Array, "T ... D"]:
        return (self.normalised(x) * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (arXiv:1607.06450), computed in float32 whatever x's type."""

    def __init__(self, size: int, epsilon: float, form: MatrixFormat) -> None:
        self.epsilon = epsilon
        self.scale = weight((size,), ("embed",), form.vector_dtype)
        self.bias = weight((size,), ("embed",), form.vector_dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
