"""A weight format that the engine doesn't have: floats with the outputs first and a step an output, as a file of its own would bring it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.deferred_collectives import as_partial_sum
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats.weight_format import MatrixAxes, WeightLeaf

STEP = 3.0  # what the stored values are divided by, so that a product without the scales is far off


@dataclass(frozen=True)
class Transposed:
    dtype: jnp.dtype

    @property
    def vector_dtype(self) -> jnp.dtype:
        return self.dtype

    @property
    def expert_dtype(self) -> jnp.dtype:
        return self.dtype

    @property
    def is_plain(self) -> bool:
        return False

    def for_matrix(self, axes: MatrixAxes) -> Transposed:
        return self

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        named = (*axes.outputs, *axes.inputs)
        matrix = WeightLeaf(tuple(size for _, size in named), tuple(name for name, _ in named), self.dtype)
        return matrix, WeightLeaf(axes.output_shape, tuple(name for name, _ in axes.outputs), self.dtype, "_steps")

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        return (matrix / STEP).astype(self.dtype), jnp.full(matrix.shape[:output_axes], STEP, self.dtype)

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
        flat, steps = arrays[0].reshape(*axes.output_shape, axes.num_inputs), arrays[1]
        sharding = jax.typeof(flat).sharding
        *outputs, inputs = sharding.spec

        def local(x: Array, flat: Array, steps: Array) -> Array:
            y = jnp.einsum("ti,...i->t...", x, flat) * steps
            return jax.lax.psum(y, inputs) if is_summed and inputs is not None else y

        product: Array = jax.shard_map(
            local if is_summed else as_partial_sum(local),
            mesh=sharding.mesh,
            in_specs=(PartitionSpec(None, inputs), sharding.spec, PartitionSpec(*outputs)),
            out_specs=PartitionSpec(*(() if is_summed else (inputs,)), None, *outputs),
            check_vma=False,
        )(x, flat, steps)
        return product.astype(x.dtype)

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        return arrays[0], 0, len(arrays[0])

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        values, steps = (array.at[places].get(mode="clip", out_sharding=out_sharding) for array in arrays)
        return (values * steps[:, None]).astype(dtype)

    def unsupported_reason(self, platform: str) -> str | None:
        return None

    def __str__(self) -> str:
        return f"{self.dtype} transposed"
