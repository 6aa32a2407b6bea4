"""Normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.layers.matrices import MatrixFormat, weight


def inverse_rms(wide: Float[Array, "*T D"], epsilon: float, factor: float = 1) -> Float[Array, "*T 1"]:
    """1 / sqrt(mean square * factor + epsilon)."""
    square = wide * wide if factor == 1 else wide * wide * factor
    # Nothing but the root is left to do with the sum: of one row that is a scalar, and other arithmetic with it keeps XLA from normalising in
    # one launch on a GPU.
    return jax.lax.rsqrt(jnp.sum((square + epsilon) * (1 / wide.shape[-1]), axis=-1, keepdims=True))


class RMSNorm(nnx.Module):
    """Root mean square norm (arXiv:1910.07467), computed in float32 whatever x's type."""

    def __init__(self, size: int, epsilon: float, form: MatrixFormat, axis: str = "embed") -> None:
        self.epsilon = epsilon
        self.scale = weight((size,), (axis,), form.vector_dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * self._inverse_rms(wide)
        return wide.astype(x.dtype) * self.scale[...].astype(x.dtype)

    def _inverse_rms(self, wide: Float[Array, "T D"]) -> Float[Array, "T 1"]:
        return inverse_rms(wide, self.epsilon)


class HeadsRMSNorm(RMSNorm):
    """All heads of a token as one. The scale is flat: vectors of all layers lie in one array, what has more axes each in its own. `too_many`: how many
    times as many heads there are as count, where a mesh has copies, or heads of zeros."""

    def __init__(self, size: int, epsilon: float, form: MatrixFormat, axis: str, too_many: float) -> None:
        super().__init__(size, epsilon, form, axis)
        self.too_many = too_many

    def __call__(self, x: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        num_tokens, num_heads, head_size = x.shape
        heads = jax.typeof(x).sharding.spec[1]
        flat, apart = (PartitionSpec(None, heads), PartitionSpec(None, heads, None)) if heads is not None else (None, None)
        wide = jax.lax.reshape(x, (num_tokens, num_heads * head_size), out_sharding=flat)
        return jax.lax.reshape(super().__call__(wide), x.shape, out_sharding=apart)

    def _inverse_rms(self, wide: Float[Array, "T D"]) -> Float[Array, "T 1"]:
        return inverse_rms(wide, self.epsilon, self.too_many)


class OffsetRMSNorm(RMSNorm):
    """Gemma's: the scale is 1 more than its parameter, and multiplies in float32."""

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * self._inverse_rms(wide)
        return (wide * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (arXiv:1607.06450), computed in float32 whatever x's type."""

    def __init__(self, size: int, epsilon: float, form: MatrixFormat) -> None:
        self.epsilon = epsilon
        self.scale = weight((size,), ("embed",), form.vector_dtype)
        self.bias = weight((size,), ("embed",), form.vector_dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * inverse_rms(wide, self.epsilon)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
