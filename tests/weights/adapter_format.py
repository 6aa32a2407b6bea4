"""A weight format with low-rank adapters beside each matrix of a linear layer (LoRA, arXiv:2106.09685): each token's row
chooses one, or none. As a file of its own would bring it; where the factors come from is not the format's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats.weight_format import MatrixAxes, WeightLeaf
from tests.weights.transposed_format import STEP, Transposed

NUM_ADAPTERS, RANK = 2, 3


@dataclass(frozen=True)
class WithAdapters(Transposed):
    """A transposed matrix; the inputs' factors of all adapters, and the outputs' factors of all, which are zeros until
    someone fills them."""

    def for_matrix(self, axes: MatrixAxes) -> Transposed:
        return self if axes.inputs_first else Transposed(self.dtype)  # embeddings have none

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        (inputs, in_names), (outputs, out_names) = (_split(named) for named in (axes.inputs, axes.outputs))
        ranks = NUM_ADAPTERS * RANK
        factors = WeightLeaf((ranks, *inputs), (None, *in_names), self.dtype, "_down")
        return *super().leaves(axes), factors, WeightLeaf((*outputs, ranks), (*out_names, None), self.dtype, "_up")

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        ranks, outputs, inputs = NUM_ADAPTERS * RANK, matrix.shape[:output_axes], matrix.shape[output_axes:]
        factors = jnp.zeros((ranks, *inputs), self.dtype), jnp.zeros((*outputs, ranks), self.dtype)
        return *super().from_plain(matrix, output_axes), *factors

    def num_misfits(self, arrays: Sequence[Array]) -> None:
        return None

    def product(
        self,
        x: Float[Array, "T I"],
        arrays: Sequence[Any],
        axes: MatrixAxes,
        context: StepContext = NO_CONTEXT,
        *,
        is_summed: bool = True,
    ) -> Float[Array, "..."]:
        matrix, steps, down, up = arrays
        y = super().product(x, (matrix, steps), axes, is_summed=is_summed)
        if context.adapters is None:
            return y
        assert is_summed
        ranks = ("rank", NUM_ADAPTERS * RANK)
        low = super().product(x, (down, jnp.ones(ranks[1], self.dtype)), MatrixAxes((ranks,), axes.inputs, inputs_first=True))
        is_own = context.adapters[:, None] == jnp.arange(ranks[1]) // RANK
        return y + super().product(jnp.where(is_own, low, 0.0), (up / STEP, steps), MatrixAxes(axes.outputs, (ranks,), inputs_first=True))


def _split(named: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return tuple(size for _, size in named), tuple(name for name, _ in named)
