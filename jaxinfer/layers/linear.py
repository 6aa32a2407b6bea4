"""Matrix products with named axes."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.deferred_collectives import PartialSums, reduce_partial_sums
from jaxinfer.layers.matrices import add_matrix, weight
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats.weight_format import ModelWeightFormat


class Linear(nnx.Module):
    """x @ kernel + bias over named axes: `[T, in...] @ [in..., out...] -> [T, out...]`. The weight format decides how
    the kernel is stored and multiplied: `kernel`, and further parameters such as `kernel_scale`. A kernel with input
    axes split over devices gives partial sums, which are reduced."""

    context: StepContext = NO_CONTEXT  # of the step being traced: see `with_context`

    def __init__(
        self,
        in_axes: dict[str, int],
        out_axes: dict[str, int],
        weight_format: ModelWeightFormat,
        *,
        use_bias: bool = False,
    ) -> None:
        self.matrix = add_matrix(self, "kernel", out_axes, in_axes, weight_format, inputs_first=True)
        self.bias = weight(tuple(out_axes.values()), tuple(out_axes), weight_format.vector_dtype) if use_bias else None

    def __call__(self, x: Float[Array, "T ..."], tokens: str | None = None) -> Float[Array, "T ..."]:
        """`tokens`: the mesh axis over which to split the result's tokens; None: all on every device."""
        y = self._product(x, is_summed=True) if tokens is None else reduce_partial_sums(self._product(x, is_summed=False), tokens)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def parts(self, x: Float[Array, "T ..."]) -> PartialSums:
        """Each device's partial sums, not reduced yet, of a product without a bias."""
        assert self.bias is None
        return self._product(x, is_summed=False)

    def _product(self, x: Float[Array, "T ..."], *, is_summed: bool) -> Float[Array, "..."]:
        return self.matrix.product(self, x.reshape(x.shape[0], self.matrix.axes.num_inputs), self.context, is_summed=is_summed)


def with_context(module: Any, context: StepContext) -> Any:
    """A module that was just put together inside a program, whose linear products know what the step's rows bring."""
    if not context.is_empty:
        for _, part in nnx.iter_modules(module):
            if isinstance(part, Linear):
                part.context = nnx.data(context)
    return module


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x * sigmoid(x)."""
    return x * jax.nn.sigmoid(x)
