"""Matrices of bfloat16 in 12 bits a value, without loss, as a CPU kernel reads them (`lossless_matmul.layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats import in_place
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.weight_format import MatrixAxes, WeightFormat, WeightLeaf
from pallas_kernels.lossless_matmul.layout import GROUP, LANES, num_misfits, output_values, packs, tile_bytes, tile_steps
from pallas_kernels.lossless_matmul.op import lossless_matmul, pack, unsupported_reason

BFLOAT16 = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Lossless:
    """Matrices multiplied in place by `lossless_matmul`. Others, and those whose values don't fit, are `Packed`."""

    num_shards: int = 1  # devices over which inputs may be split: each has whole tiles
    incompressible: frozenset[MatrixAxes] = frozenset()

    @property
    def uncompressed(self) -> WeightFormat:
        """The format of matrices that this one can't hold."""
        return Packed(BFLOAT16)

    @property
    def dtype(self) -> jnp.dtype:
        return BFLOAT16

    @property
    def vector_dtype(self) -> jnp.dtype:
        return BFLOAT16

    @property
    def expert_dtype(self) -> jnp.dtype:
        return BFLOAT16

    @property
    def is_plain(self) -> bool:
        return False

    def for_matrix(self, axes: MatrixAxes) -> WeightFormat:
        fits = packs(axes.outputs[-1][1], axes.num_inputs) and axes not in self.incompressible
        return self if fits else self.uncompressed.for_matrix(axes)

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        *outer, (last_output, num_outputs) = axes.outputs
        steps = tile_steps(axes.num_inputs, self.num_shards)
        num_tiles = axes.num_inputs // GROUP // steps
        named = (*outer, (last_output, num_outputs // LANES), (axes.inputs[0][0], num_tiles), (None, tile_bytes(steps)))
        shape, names = tuple(size for _, size in named), tuple(name for name, _ in named)
        return (WeightLeaf(shape, names, jnp.dtype("uint8"), is_read_in_place=True),)

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        return (pack(matrix.astype(BFLOAT16), output_axes, self.num_shards),)

    def num_misfits(self, arrays: Sequence[Array]) -> Int[Array, ""]:
        return num_misfits(arrays[0])

    def product(
        self,
        x: Float[Array, "T I"],
        arrays: Sequence[Any],
        axes: MatrixAxes,
        context: StepContext = NO_CONTEXT,
        *,
        is_summed: bool = True,
    ) -> Float[Array, "..."]:
        return in_place.product(x, arrays[0], _products, len(axes.outputs), 1, is_summed=is_summed)

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        return arrays[0].stack, 1, arrays[0].stack.shape[1] * LANES

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        (matrix,) = arrays
        tiles = matrix.stack.at[matrix.index, places // LANES].get(mode="clip", out_sharding=out_sharding)
        return output_values(tiles, places % LANES).astype(dtype)

    def unsupported_reason(self, platform: str) -> str | None:
        return f"its kernels are for CPUs, not {platform}" if platform != "cpu" else unsupported_reason()

    def __str__(self) -> str:
        return "bfloat16 lossless"


def _products(x: Float[Array, "T I"], stack: Array, place: Int[Array, ""]) -> Float[Array, "T O"]:
    return lossless_matmul(x.astype(BFLOAT16), stack, place)
