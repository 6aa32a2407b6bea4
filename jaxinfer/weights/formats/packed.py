"""Matrices of floats or 8-bit integers, in the order in which a CPU kernel reads them (`packed_matmul.layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats import in_place, int8
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import MatrixAxes, StackedMatrix, WeightFormat, WeightLeaf
from pallas_kernels.packed_matmul.layout import GROUP, LANES, ZERO, pack, packed_dtype, packs
from pallas_kernels.packed_matmul.op import packed_matmul, unsupported_reason


@dataclass(frozen=True)
class Packed:
    """Matrices multiplied in place by `packed_matmul`'s kernels; integers have a float32 scale per output."""

    dtype: jnp.dtype  # what is packed: float32, bfloat16 or int8

    @property
    def unpacked(self) -> WeightFormat:
        """The format of matrices whose sizes panels don't divide."""
        return int8.Int8() if self._is_int8 else Plain(self.dtype)

    @property
    def vector_dtype(self) -> jnp.dtype:
        return self.unpacked.vector_dtype

    @property
    def expert_dtype(self) -> jnp.dtype:
        return self.unpacked.expert_dtype

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def _is_int8(self) -> bool:
        return self.dtype == int8.INT8

    def for_matrix(self, axes: MatrixAxes) -> WeightFormat:
        return self if packs(self.dtype, axes.outputs[-1][1], axes.inputs[-1][1]) else self.unpacked

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        group = GROUP[self.dtype.name]
        (*outer, (last_output, num_outputs)), (*inner, (last_input, num_inputs)) = axes.outputs, axes.inputs
        named = (*outer, (last_output, num_outputs // LANES), *inner, (last_input, num_inputs // group), (None, LANES), (None, group))
        shape, names = tuple(size for _, size in named), tuple(name for name, _ in named)
        matrix = WeightLeaf(shape, names, packed_dtype(self.dtype), is_read_in_place=True)
        return (matrix, int8.scale_leaf(axes)) if self._is_int8 else (matrix,)

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        values, *scales = int8.Int8().from_plain(matrix, output_axes) if self._is_int8 else (matrix,)
        return pack(values, self.dtype, output_axes), *scales

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
        matrix, *scales = arrays
        return in_place.product(x, matrix, _products, len(axes.outputs), 2, *scales, is_summed=is_summed)

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        return arrays[0].stack, 1, arrays[0].stack.shape[1] * LANES

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        matrix, *scales = arrays
        found = rows(matrix, places, out_sharding).astype(dtype)
        return int8.scaled_rows(found, scales[0], places, out_sharding) if scales else found

    def unsupported_reason(self, platform: str) -> str | None:
        return f"its kernels are for CPUs, not {platform}" if platform != "cpu" else unsupported_reason(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} packed"


def _products(x: Float[Array, "T I"], stack: Array, place: Int[Array, ""], *scale: Float[Array, " O"]) -> Float[Array, "T O"]:
    if not scale:
        return packed_matmul(x.astype(stack.dtype), stack, place)
    return int8.of_integers(x, lambda rows: packed_matmul(rows, stack, place))


def rows(matrix: StackedMatrix, places: Int[Array, " T"], out_sharding: PartitionSpec | None) -> Array:
    """[T, I]: rows of these outputs, of a matrix with one axis of outputs."""
    found = matrix.stack.at[matrix.index, places // LANES, :, places % LANES].get(mode="clip", out_sharding=out_sharding)
    found = found.reshape(len(places), -1)
    return found.astype(jnp.int32) - ZERO if found.dtype == jnp.uint8 else found
