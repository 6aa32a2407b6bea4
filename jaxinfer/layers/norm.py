"""RMS norm, layer norm and variants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.layers.matrices import weight
from jaxinfer.weights.formats.weight_format import ModelWeightFormat


def inverse_rms(wide: Float[Array, "*T D"], epsilon: float, factor: float = 1) -> Float[Array, "*T 1"]:
    """1 / sqrt(mean square * factor + epsilon)."""
    square = wide * wide if factor == 1 else wide * wide * factor
    # Only the root is left after the sum: a single row's sum is a scalar, and further arithmetic on it would keep XLA
    # from fusing the norm into one launch on a GPU.
    return jax.lax.rsqrt(jnp.sum((square + epsilon) * (1 / wide.shape[-1]), axis=-1, keepdims=True))


class RMSNorm(nnx.Module):
    """Root mean square norm (arXiv:1910.07467), computed in float32 for any type of x."""

    def __init__(self, size: int, epsilon: float, weight_format: ModelWeightFormat, axis: str = "embed") -> None:
        self.epsilon = epsilon
        self.scale = weight((size,), (axis,), weight_format.vector_dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * self._inverse_rms(wide)
        return wide.astype(x.dtype) * self.scale[...].astype(x.dtype)

    def _inverse_rms(self, wide: Float[Array, "T D"]) -> Float[Array, "T 1"]:
        return inverse_rms(wide, self.epsilon)


class HeadsRMSNorm(RMSNorm):
    """Norm over all heads of a token together. The scale is flat, so that it can be stacked with other layers' vectors.
    `too_many`: ratio of heads on the mesh, with copies and zeros, to the model's."""

    def __init__(self, size: int, epsilon: float, weight_format: ModelWeightFormat, axis: str, too_many: float) -> None:
        super().__init__(size, epsilon, weight_format, axis)
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
    """Gemma's: the parameter is the scale minus 1, and multiplies in float32."""

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * self._inverse_rms(wide)
        return (wide * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (arXiv:1607.06450), computed in float32 for any type of x."""

    def __init__(self, size: int, epsilon: float, weight_format: ModelWeightFormat) -> None:
        self.epsilon = epsilon
        self.scale = weight((size,), ("embed",), weight_format.vector_dtype)
        self.bias = weight((size,), ("embed",), weight_format.vector_dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * inverse_rms(wide, self.epsilon)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
