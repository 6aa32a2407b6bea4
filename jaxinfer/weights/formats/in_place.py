"""Products with matrices that CPU kernels read in place, over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.deferred_collectives import as_partial_sum
from jaxinfer.weights.formats.weight_format import StackedMatrix
from pallas_kernels.packed_matmul.layout import LANES

Products = Callable[..., Float[Array, "T O"]]


def product(
    x: Float[Array, "T I"],
    matrix: StackedMatrix,
    products: Products,
    output_axes: int,
    tile_axes: int,
    *scale: Float[Array, "*O"],
    is_summed: bool = True,
) -> Float[Array, "..."]:
    """x times the matrix, [T, *O] in x's type; the sums are multiplied by the scale, if there is one.

    Args:
      matrix: of axes [S, outputs..., inputs..., a tile's]. Inputs are split over devices along their first axis.
      products: (x, stack with one axis each of outputs and inputs, place, scale) -> sums, on one device.

    Inputs that are split are summed over devices, or else come as `deferred_collectives.PartialSums`; outputs stay
    split.
    """
    sharding = jax.typeof(matrix.stack).sharding
    _, *axes = sharding.spec
    outputs, inputs = axes[:output_axes], axes[output_axes]
    is_split = is_summed and inputs is not None and sharding.mesh.shape[inputs] > 1
    local = partial(_local, products, output_axes, tile_axes, inputs if is_split else None)
    over_shards = jax.shard_map(
        local if is_summed else as_partial_sum(local),
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(None, inputs), sharding.spec, PartitionSpec(), *(PartitionSpec(*outputs) for _ in scale)),
        out_specs=PartitionSpec(*(() if is_summed else (inputs,)), None, *outputs),
        check_vma=False,
    )
    return over_shards(x, matrix.stack, matrix.index, *scale)


def _local(
    products: Products,
    output_axes: int,
    tile_axes: int,
    split_over: str | None,
    x: Float[Array, "T I"],
    stack: Array,
    place: Int[Array, ""],
    *scale: Float[Array, "*O"],
) -> Float[Array, "T *O"]:
    """On one device."""
    num, *outputs = stack.shape[: output_axes + 1]
    y = products(x, stack.reshape(num, prod(outputs), -1, *stack.shape[stack.ndim - tile_axes :]), place, *scale)
    y = y if split_over is None else jax.lax.psum(y, split_over)
    for of_outputs in scale:
        y = y * of_outputs.reshape(-1)
    return y.reshape(-1, *outputs[:-1], outputs[-1] * LANES).astype(x.dtype)
