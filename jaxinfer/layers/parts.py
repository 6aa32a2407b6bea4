"""Sums over devices that are put off: parts of several modules are added first, so that one all-reduce serves them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

Parts: TypeAlias = Float[Array, "N ..."]  # each device's part of a sum, along a first axis that lies over them; or one that all have, whole


def as_part(local: Callable[..., Array]) -> Callable[..., Array]:
    """For `jax.shard_map`: what `local` gives on one device, as its part."""
    return lambda *args: local(*args)[None]


def summed(parts: Parts) -> Float[Array, "..."]:
    """On every device."""
    sharding = jax.typeof(parts).sharding
    axis = sharding.spec[0]
    if axis is None:
        return parts[0]

    def local(part: Parts) -> Float[Array, "..."]:
        return part[0] if sharding.mesh.shape[axis] == 1 else jax.lax.psum(part[0], axis)

    over_shards = jax.shard_map(local, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=PartitionSpec(), check_vma=False)
    total: Array = over_shards(parts)
    return total
