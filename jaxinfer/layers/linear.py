"""Matrix products with named axes."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.layers import int8, packed
from jaxinfer.layers.deferred_collectives import PartialSums, as_partial_sum, reduce_partial_sums
from jaxinfer.layers.matrices import InStack, MatrixFormat, matrix, weight


def product(
    x: Float[Array, "T I"], kernel: Float[Array, "..."], *, equation: str = "ti,io->to", out_sharding: PartitionSpec | None = None
) -> Float[Array, "T O"]:
    """x @ kernel in x's type. A kernel of a narrower type than x is multiplied in its own and summed in x's: that is how a CPU runs
    bfloat16 weights at twice float32's speed, while bfloat16 results would make it six times slower."""
    narrow = x.astype(kernel.dtype)
    # XLA on CPU has no fast product of a single narrow row: two take an eighth of its time.
    rows = jnp.concatenate([narrow, narrow]) if len(narrow) == 1 and kernel.dtype != x.dtype else narrow
    return jnp.einsum(equation, rows, kernel, preferred_element_type=x.dtype, out_sharding=out_sharding)[: len(narrow)]


class Linear(nnx.Module):
    """x @ kernel + bias over named axes: `[T, in...] @ [in..., out...] -> [T, out...]`, the kernel stored so that a product streams
    whole rows; packed or of integers `[out..., in...]`, integers with a scale an output. A kernel whose input axes are split over devices gives partial sums,
    which are added over the mesh."""

    def __init__(
        self,
        in_axes: dict[str, int],
        out_axes: dict[str, int],
        form: MatrixFormat,
        *,
        use_bias: bool = False,
    ) -> None:
        self.in_shape, self.out_shape = tuple(in_axes.values()), tuple(out_axes.values())
        self.kernel = matrix(out_axes, in_axes, form, inputs_first=True)
        self.kernel_scale = weight(self.out_shape, tuple(out_axes), form.vector_dtype) if form.is_int8 else None
        self.bias = weight(self.out_shape, tuple(out_axes), form.vector_dtype) if use_bias else None

    def __call__(self, x: Float[Array, "T ..."], tokens: str | None = None) -> Float[Array, "T ..."]:
        """`tokens`: the mesh axis that the result's tokens are to be split over; None: all on every device."""
        y = self._product(x, is_summed=True) if tokens is None else reduce_partial_sums(self._product(x, is_summed=False), tokens)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def parts(self, x: Float[Array, "T ..."]) -> PartialSums:
        """Each device's partial sums, yet to be added over the mesh, of a product without a bias."""
        assert self.bias is None
        return self._product(x, is_summed=False)

    def _product(self, x: Float[Array, "T ..."], *, is_summed: bool) -> Float[Array, "..."]:
        # As one plain matrix product over flat input axes: XLA reorders those of a general one, and then transposes the weights in every step.
        in_size = math.prod(self.in_shape)
        flat, kernel = x.reshape(x.shape[0], in_size), self.kernel.get_value()
        scale = None if self.kernel_scale is None else self.kernel_scale[...]
        if isinstance(kernel, InStack):
            return packed.product(flat, kernel, scale, len(self.out_shape), is_summed=is_summed)
        if scale is not None:
            return int8.product(flat, kernel.reshape(*self.out_shape, in_size), scale, is_summed=is_summed)
        plain = kernel.reshape(in_size, *self.out_shape)
        if is_summed:
            out_sharding = PartitionSpec() if jax.typeof(flat).sharding.spec[1] is not None else None
            return product(flat, plain, equation="ti,i...->t...", out_sharding=out_sharding)
        sharding = jax.typeof(plain).sharding
        inputs, *outputs = sharding.spec
        return jax.shard_map(
            as_partial_sum(partial(product, equation="ti,i...->t...")),
            mesh=sharding.mesh,
            in_specs=(PartitionSpec(None, inputs), sharding.spec),
            out_specs=PartitionSpec(inputs, None, *outputs),
            check_vma=False,
        )(flat, plain)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x * sigmoid(x)."""
    return x * jax.nn.sigmoid(x)
