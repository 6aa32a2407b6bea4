"""Matrices as 8-bit integers with a scale per output.

A few rows are multiplied as integers: activations become two of 8 bits each, of which the second holds what the first
rounded off. So they keep some 16 bits, and only the weights lose precision. XLA on a CPU has no fast product of one
row, so the second costs a batch of one nothing. For many rows the matrix is converted first, which costs little beside
their product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from jaxtyping import Int8 as Int8Array

from jaxinfer.layers.deferred_collectives import as_partial_sum
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats.weight_format import MatrixAxes, WeightLeaf

INT8 = jnp.dtype("int8")
SCALE = "_scale"
_MOST = 127  # of either sign, so that zero is exact
_FINER = 2 * _MOST  # of the second integer's steps in one of the first's: it holds up to half of one
_FEW_ROWS = 32  # measured on a CPU: at this many both ways take the same time


@dataclass(frozen=True)
class Int8:
    """Integers with a float32 scale per output, outputs first; multiplied by XLA."""

    @property
    def dtype(self) -> jnp.dtype:
        return INT8

    @property
    def vector_dtype(self) -> jnp.dtype:
        return jnp.dtype("float32")

    @property
    def expert_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.bfloat16)

    @property
    def is_plain(self) -> bool:
        return False

    def for_matrix(self, axes: MatrixAxes) -> Int8:
        return self

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        named = (*axes.outputs, *axes.inputs)
        return WeightLeaf(tuple(size for _, size in named), tuple(name for name, _ in named), INT8), scale_leaf(axes)

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        values, scale = quantize(matrix.reshape(*matrix.shape[:output_axes], -1))
        return values.reshape(matrix.shape), scale

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
        matrix, scale = arrays
        return product(x, matrix.reshape(*axes.output_shape, axes.num_inputs), scale, is_summed=is_summed)

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        return arrays[0], 0, len(arrays[0])

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        values, scale = arrays
        return scaled_rows(values.at[places].get(mode="clip", out_sharding=out_sharding).astype(dtype), scale, places, out_sharding)

    def unsupported_reason(self, platform: str) -> str | None:
        return None

    def __str__(self) -> str:
        return str(INT8)


def scale_leaf(axes: MatrixAxes) -> WeightLeaf:
    return WeightLeaf(axes.output_shape, tuple(name for name, _ in axes.outputs), jnp.dtype("float32"), SCALE)


def scaled_rows(
    rows: Float[Array, "T I"], scale: Float[Array, " O"], places: Int[Array, " T"], out_sharding: PartitionSpec | None
) -> Float[Array, "T I"]:
    """Rows of integers by the scales of their outputs."""
    return rows * scale.at[places].get(mode="clip", out_sharding=out_sharding)[:, None].astype(rows.dtype)


def quantize(matrix: Float[Array, "*O I"]) -> tuple[Int8Array[Array, "*O I"], Float[Array, "*O"]]:
    """Integers and the scale, float32, of each output: the value is their product. No value is off
    by more than half a scale."""
    wide = matrix.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), jnp.finfo(jnp.float32).tiny) / _MOST
    return jnp.round(wide / scale[..., None]).astype(INT8), scale


def product(
    x: Float[Array, "T I"], matrix: Int8Array[Array, "*O I"], scale: Float[Array, "*O"], *, is_summed: bool = True
) -> Float[Array, "..."]:
    """x times the matrix, [T, *O] in x's type. Inputs that are split over devices are summed over them, or else
    come as `deferred_collectives.PartialSums`; outputs stay split."""
    sharding = jax.typeof(matrix).sharding
    *outputs, inputs = sharding.spec
    local = partial(_local, split_over=inputs if is_summed else None)
    over_shards = jax.shard_map(
        local if is_summed else as_partial_sum(local),
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(None, inputs), sharding.spec, PartitionSpec(*outputs)),
        out_specs=PartitionSpec(*(() if is_summed else (inputs,)), None, *outputs),
        check_vma=False,
    )
    return over_shards(x, matrix, scale)


def _local(x: Array, matrix: Array, scale: Array, split_over: str | None) -> Array:
    """On one device. Outputs are flat, and the matrix is never transposed: XLA would do that in every step."""
    flat = matrix.reshape(prod(scale.shape), x.shape[1])

    def sums(rows: Int8Array[Array, "X I"]) -> Int[Array, "X O"]:
        return jnp.einsum("oi,ti->ot", flat, rows, preferred_element_type=jnp.int32).T

    y = of_integers(x, sums) if len(x) <= _FEW_ROWS else _converted(x, flat)
    y = y if split_over is None else jax.lax.psum(y, split_over)
    return (y * scale.reshape(-1)).reshape(-1, *scale.shape).astype(x.dtype)


def of_integers(x: Float[Array, "T I"], sums: Callable[[Int8Array[Array, "X I"]], Int[Array, "X O"]]) -> Float[Array, "T O"]:
    """x times a matrix that `sums` multiplies 8-bit rows with, each row as two of them. Of a row that is split over
    devices each rounds its own part by its own largest value."""
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    unit = jnp.maximum(most, jnp.finfo(jnp.float32).tiny) / _MOST
    high = jnp.round(wide / unit)
    low = jnp.round((wide / unit - high) * _FINER)
    rows = jnp.concatenate([high, low]).astype(INT8)
    found = sums(rows).astype(jnp.float32)
    return (found[: len(x)] + found[len(x) :] * (1 / _FINER)) * unit


def _converted(x: Float[Array, "T I"], matrix: Int8Array[Array, "O I"]) -> Float[Array, "T O"]:
    # XLA would convert all of a model's matrices before its first layer, and hold them all, if they did not
    # depend on x. A first row that is no number must not get into them, though: other rows are other requests'.
    after_x = jnp.nan_to_num(x[0, 0]) * 0
    return jnp.einsum("ti,oi->to", x, matrix.astype(x.dtype) + after_x, preferred_element_type=jnp.float32)
