"""Deferred reductions: partial sums of several modules are added first and share one collective. Also the sharding of
residuals.

A residual is whole on every device, or its tokens are split over them (sequence parallelism, arXiv:2205.05198). Norms
and additions work either way. A block's module returns the sharding of its input: it gathers split tokens, and
reduce-scatters its sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

PartialSums: TypeAlias = Float[Array, "N ..."]  # a device's partial sum in each row; or one row, whole on all devices


def as_partial_sum(local: Callable[..., Array]) -> Callable[..., Array]:
    """Wraps a `jax.shard_map` function: the result on one device becomes its partial sum."""
    return lambda *args: local(*args)[None]


def reduce_partial_sums(parts: PartialSums, tokens: str | None = None) -> Float[Array, "T ..."]:
    """The sum on every device; with `tokens`, a mesh axis, scattered over tokens."""
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
    """The mesh axis over which tokens are split; None if every device has all of them."""
    axis: str | None = jax.typeof(x).sharding.spec[0]
    return axis


def shard_tokens(x: Float[Array, "T ..."], tokens: str) -> Float[Array, "T ..."]:
    """Split tokens that all devices have over a mesh axis."""
    return jax.sharding.reshard(x, PartitionSpec(tokens))


def all_gather(x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
    """All tokens on every device."""
    return x if axis_of_tokens(x) is None else jax.sharding.reshard(x, PartitionSpec())
