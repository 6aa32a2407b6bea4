"""Matrices in the blocks of a GGUF file, as a CPU kernel reads them (`block_matmul.layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats import in_place
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import MatrixAxes, WeightLeaf
from pallas_kernels.block_matmul.block_types import BLOCK_TYPES, BlockType
from pallas_kernels.block_matmul.layout import LANES, output_values, pack, packs, tile_bytes
from pallas_kernels.block_matmul.op import block_matmul, multiplies_integers, unsupported_reason


@dataclass(frozen=True)
class GgufBlocks(Plain):
    """Matrices of one GGUF type, multiplied in place by `block_matmul`. `dtype`: of what they are multiplied with."""

    type_name: str

    @property
    def kind(self) -> BlockType:
        return BLOCK_TYPES[self.type_name]

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def as_stored(self) -> StoredBlocks:
        """The format to load with."""
        return StoredBlocks(self.dtype, self.type_name)

    def holds(self, axes: MatrixAxes) -> bool:
        """Whether panels and blocks divide a matrix."""
        return packs(self.kind, axes.outputs[-1][1], axes.num_inputs)

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        *outer, (last_output, num_outputs) = axes.outputs
        blocks = (axes.inputs[0][0], axes.num_inputs // self.kind.size)
        named = (*outer, (last_output, num_outputs // LANES), blocks, (None, tile_bytes(self.kind)))
        shape, names = tuple(size for _, size in named), tuple(name for name, _ in named)
        return (WeightLeaf(shape, names, jnp.dtype(jnp.uint8), is_read_in_place=True),)

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        """The matrix has blocks where others have inputs: [outputs..., inputs / size, bytes of a block]."""
        return (pack(self.kind, matrix, output_axes),)

    def product(
        self,
        x: Float[Array, "T I"],
        arrays: Sequence[Any],
        axes: MatrixAxes,
        context: StepContext = NO_CONTEXT,
        *,
        is_summed: bool = True,
    ) -> Float[Array, "..."]:
        products = partial(_products, self.kind, self.dtype)
        return in_place.product(x, arrays[0], products, len(axes.outputs), 1, is_summed=is_summed)

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        return arrays[0].stack, 1, arrays[0].stack.shape[1] * LANES

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        (matrix,) = arrays
        tiles = matrix.stack.at[matrix.index, places // LANES].get(mode="clip", out_sharding=out_sharding)
        return output_values(self.kind, tiles, places % LANES).astype(dtype)

    def unsupported_reason(self, platform: str) -> str | None:
        return f"its kernels are for CPUs, not {platform}" if platform != "cpu" else unsupported_reason()

    def __str__(self) -> str:
        return self.type_name


@dataclass(frozen=True)
class StoredBlocks(Plain):
    """Matrices as the file has them, to be made `GgufBlocks`: they are never multiplied."""

    type_name: str

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        kind = BLOCK_TYPES[self.type_name]
        named = (*axes.outputs, (axes.inputs[0][0], axes.num_inputs // kind.size), (None, kind.num_bytes))
        return (WeightLeaf(tuple(size for _, size in named), tuple(name for name, _ in named), jnp.dtype(jnp.uint8)),)


def _products(kind: BlockType, dtype: jnp.dtype, x: Float[Array, "T I"], stack: UInt8[Array, "S P K B"], place: Int[Array, ""]) -> Array:
    if dtype == jnp.bfloat16 and multiplies_integers():  # 16 bits of a row's largest value: finer than bfloat16's 8
        return block_matmul(x, stack, place, kind, is_rounded=True)
    return block_matmul(x.astype(dtype), stack, place, kind)
