"""Products with packed matrices, over a mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers import int8
from jaxinfer.layers.deferred_collectives import as_partial_sum
from jaxinfer.layers.matrices import InStack
from pallas_kernels.packed_matmul.layout import LANES, ZERO
from pallas_kernels.packed_matmul.op import packed_matmul


def product(
    x: Float[Array, "T I"], matrix: InStack, scale: Float[Array, "*O"] | None, output_axes: int, *, is_summed: bool = True
) -> Float[Array, "..."]:
    """x times the matrix, [T, *O] in x's type; integers come with a scale an output. Inputs that are split over devices are summed over
    them, or else come as `deferred_collectives.PartialSums`; outputs stay split."""
    sharding = jax.typeof(matrix.stack).sharding
    _, *axes, _, _ = sharding.spec
    outputs, inputs = axes[:output_axes], axes[output_axes]
    is_split = is_summed and inputs is not None and sharding.mesh.shape[inputs] > 1
    local = partial(_local, output_axes=output_axes, split_over=inputs if is_split else None)
    of_scale = None if scale is None else PartitionSpec(*outputs)
    over_shards = jax.shard_map(
        local if is_summed else as_partial_sum(local),
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(None, inputs), sharding.spec, PartitionSpec(), of_scale),
        out_specs=PartitionSpec(*(() if is_summed else (inputs,)), None, *outputs),
        check_vma=False,
    )
    return over_shards(x, matrix.stack, matrix.place, scale)


def _local(
    x: Float[Array, "T I"],
    stack: Array,
    place: Int[Array, ""],
    scale: Float[Array, "*O"] | None,
    output_axes: int,
    split_over: str | None,
) -> Float[Array, "T *O"]:
    """On one device."""
    num, *outputs = stack.shape[: output_axes + 1]
    flat = stack.reshape(num, -1, x.shape[1] // stack.shape[-1], *stack.shape[-2:])
    outputs[-1] *= LANES
    if scale is None:
        y = packed_matmul(x.astype(stack.dtype), flat, place)
    else:
        y = int8.of_integers(x, lambda rows: packed_matmul(rows, flat, place))
    y = y if split_over is None else jax.lax.psum(y, split_over)
    y = y if scale is None else y * scale.reshape(-1)
    return y.reshape(-1, *outputs).astype(x.dtype)


def rows(matrix: InStack, places: Int[Array, " T"], out_sharding: PartitionSpec | None) -> Array:
    """[T, I]: of a matrix with one axis of outputs, those at these places."""
    found = matrix.stack.at[matrix.place, places // LANES, :, places % LANES].get(mode="clip", out_sharding=out_sharding)
    found = found.reshape(len(places), -1)
    return found.astype(jnp.int32) - ZERO if found.dtype == jnp.uint8 else found
