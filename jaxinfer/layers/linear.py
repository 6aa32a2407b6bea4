"""Matrix products with named axes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter whose dimensions carry logical names; which mesh axis they lie on is decided outside the model."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


class Linear(nnx.Module):
    """x @ kernel + bias over named axes: `[T, in...] @ [in..., out...] -> [T, out...]`, the kernel stored so that a product streams
    whole rows. A kernel whose input axes are split over devices gives partial sums, which are added over the mesh."""

    def __init__(
        self,
        in_axes: dict[str, int],
        out_axes: dict[str, int],
        dtype: jnp.dtype,
        *,
        use_bias: bool = False,
    ) -> None:
        self.in_shape, self.out_shape = tuple(in_axes.values()), tuple(out_axes.values())
        self.kernel = weight((*self.in_shape, *self.out_shape), (*in_axes, *out_axes), dtype)
        self.bias = weight(self.out_shape, tuple(out_axes), dtype) if use_bias else None

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        # As one plain matrix product: XLA reorders the axes of a general one, and then transposes the weights in every step.
        flat = x.reshape(x.shape[0], math.prod(self.in_shape))
        kernel = self.kernel[...].reshape(math.prod(self.in_shape), math.prod(self.out_shape))
        is_split = jax.typeof(flat).sharding.spec[1] is not None
        y = jnp.matmul(flat, kernel, out_sharding=PartitionSpec() if is_split else None)
        y = y.reshape(x.shape[0], *self.out_shape)
        return y if self.bias is None else y + self.bias[...]


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x * sigmoid(x)."""
    return x * jax.nn.sigmoid(x)
