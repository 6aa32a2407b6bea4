"""Sums over devices: put off, so that parts of several modules are added first and one collective serves them all; and where what comes of them lies.

A residual is whole on every device, or its tokens are split over them (sequence parallelism, arXiv:2205.05198). What lies between sums, norms and
additions, works either way. A module of a block gives its result as its input lies: it gathers tokens that are split, and scatters its sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

PartialSums: TypeAlias = Float[
    Array, "N ..."
]  # each device's part of a sum, along a first axis that lies over them; or one that all have, whole


def as_partial_sum(local: Callable[..., Array]) -> Callable[..., Array]:
    """For `jax.shard_map`: what `local` gives on one device, as its part."""
    return lambda *args: local(*args)[None]


def reduce_partial_sums(parts: PartialSums, tokens: str | None = None) -> Float[Array, "T ..."]:
    """On every device; or of tokens that are split over this mesh axis, each device's."""
    sharding = jax.typeof(parts).sharding
    axis = sharding.spec[0]
    if axis is None:
        return parts[0] if tokens is None else shard_tokens(parts[0], tokens)

    def local(part: PartialSums) -> Float[Array, "T ..."]:
        if tokens is not None:
            return jax.lax.psum_scatter(part[0], axis, scatter_dimension=0, tiled=True)
        return part[0] if sharding.mesh.shape[axis] == 1 else jax.lax.psum(part[0], axis)

    over_shards = jax.shard_map(local, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=PartitionSpec(tokens), check_vma=False)
    total: Array = over_shards(parts)
    return total


def axis_of_tokens(x: Float[Array, "T ..."]) -> str | None:
    """The mesh axis that tokens are split over; None where every device has all of them."""
    axis: str | None = jax.typeof(x).sharding.spec[0]
    return axis


def shard_tokens(x: Float[Array, "T ..."], tokens: str) -> Float[Array, "T ..."]:
    """Of tokens that all devices have, each device's share."""
    return jax.sharding.reshard(x, PartitionSpec(tokens))


def all_gather(x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
    """All tokens on every device."""
    return x if axis_of_tokens(x) is None else jax.sharding.reshard(x, PartitionSpec())
