"""Matrices of floats, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.deferred_collectives import as_partial_sum
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats.weight_format import MatrixAxes, WeightFormat, WeightLeaf


@dataclass(frozen=True)
class Plain:
    """Matrices of one float type, multiplied by XLA."""

    dtype: jnp.dtype

    @property
    def vector_dtype(self) -> jnp.dtype:
        return self.dtype

    @property
    def expert_dtype(self) -> jnp.dtype:
        return self.dtype

    @property
    def is_plain(self) -> bool:
        return True

    def for_matrix(self, axes: MatrixAxes) -> Plain:
        return self

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        named = (*axes.inputs, *axes.outputs) if axes.inputs_first else (*axes.outputs, *axes.inputs)
        return (WeightLeaf(tuple(size for _, size in named), tuple(name for name, _ in named), self.dtype),)

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        return (matrix.astype(self.dtype),)

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
        (matrix,) = arrays
        if not axes.inputs_first:
            assert is_summed and len(axes.outputs) == len(axes.inputs) == 1, axes
            return multiply(x, matrix, equation="ti,oi->to")
        # As one plain matrix product over flat input axes: XLA reorders those of a general one, and then transposes the
        # weights in every step.
        flat = matrix.reshape(axes.num_inputs, *axes.output_shape)
        if is_summed:
            out_sharding = PartitionSpec() if jax.typeof(x).sharding.spec[1] is not None else None
            return multiply(x, flat, equation="ti,i...->t...", out_sharding=out_sharding)
        sharding = jax.typeof(flat).sharding
        inputs, *outputs = sharding.spec
        return jax.shard_map(
            as_partial_sum(partial(multiply, equation="ti,i...->t...")),
            mesh=sharding.mesh,
            in_specs=(PartitionSpec(None, inputs), sharding.spec),
            out_specs=PartitionSpec(inputs, None, *outputs),
            check_vma=False,
        )(x, flat)

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        return arrays[0], 0, len(arrays[0])

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        return arrays[0].at[places].get(mode="clip", out_sharding=out_sharding).astype(dtype)

    def unsupported_reason(self, platform: str) -> str | None:
        return None

    def __str__(self) -> str:
        return str(self.dtype)


@dataclass(frozen=True)
class AsStored(Plain):
    """Matrices as most checkpoints store them, outputs first, where another format is made of them: they are never
    multiplied."""

    target: WeightFormat

    def for_matrix(self, axes: MatrixAxes) -> Plain:
        return Plain(self.dtype) if self.target.for_matrix(axes).is_plain else self

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        named = (*axes.outputs, *axes.inputs)
        return (WeightLeaf(tuple(size for _, size in named), tuple(name for name, _ in named), self.dtype),)


def multiply(
    x: Float[Array, "T I"], kernel: Float[Array, "..."], *, equation: str = "ti,io->to", out_sharding: PartitionSpec | None = None
) -> Float[Array, "T O"]:
    """x @ kernel in x's type. A kernel of a narrower type than x is multiplied in its own and summed in x's: that is
    how a CPU runs bfloat16 weights at twice float32's speed, while bfloat16 results would make it six times slower."""
    narrow = x.astype(kernel.dtype)
    # XLA on CPU has no fast product of a single narrow row: two take an eighth of its time.
    rows = jnp.concatenate([narrow, narrow]) if len(narrow) == 1 and kernel.dtype != x.dtype else narrow
    return jnp.einsum(equation, rows, kernel, preferred_element_type=x.dtype, out_sharding=out_sharding)[: len(narrow)]
