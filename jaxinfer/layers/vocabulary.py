"""Arrays sharded over the vocabulary, and the collectives that combine shards' results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped


@dataclass(frozen=True)
class VocabShard:
    """One device's shard, inside `shard_over_vocab`. Shards have equal sizes, in the order of tokens."""

    axis: str | None = None  # the mesh axis of shards; None: the vocabulary is whole
    num_shards: int = 1

    @property
    def is_whole(self) -> bool:
        return self.axis is None

    def all_gather(self, x: Shaped[Array, "..."]) -> Shaped[Array, "P ..."]:
        """Arrays of all shards."""
        return x[None] if self.axis is None else jax.lax.all_gather(x, self.axis)

    def all_sum(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The sum over shards, added in their order: so all devices agree to the last bit, which an all-reduce doesn't
        guarantee."""
        return x if self.axis is None else self.all_gather(x).sum(0)

    def all_max(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The maximum over shards."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def places(self, tokens: Int[Array, "..."], size: int) -> Int[Array, "..."]:
        """Indices of tokens in this shard, of this size; tokens of other shards get an index past its end."""
        if self.axis is None:
            return tokens
        place = tokens - self.first(size)
        return jnp.where(place < 0, size, place)  # a negative one would count from the end

    def first(self, size: int) -> Int[Array, ""]:
        """The first token of this shard, of this size."""
        return jnp.int32(0) if self.axis is None else jax.lax.axis_index(self.axis) * size


WHOLE = VocabShard()


def split_axis(x: Shaped[Array, "..."], dimension: int) -> str | None:
    """The mesh axis over which a dimension is split; None if it isn't, or over one device only."""
    sharding = jax.typeof(x).sharding
    axis = sharding.spec[dimension]
    return None if axis is None or sharding.mesh.shape[axis] == 1 else axis


def shard_over_vocab(function: Callable[..., Any], x: Shaped[Array, "..."], dimension: int, *arguments: Any, out_specs: Any = None) -> Any:
    """`function(shard, *arguments)` on every device, with the device's shards of arrays that are split as `x` is along
    `dimension`. Its result is the same on all devices, unless `out_specs` says otherwise. A plain call if nothing is
    split."""
    axis = split_axis(x, dimension)
    if axis is None:
        return function(WHOLE, *arguments)
    mesh = jax.typeof(x).sharding.mesh
    return jax.shard_map(
        partial(function, VocabShard(axis, mesh.shape[axis])),
        mesh=mesh,
        in_specs=specs(arguments),
        out_specs=PartitionSpec() if out_specs is None else out_specs,
        check_vma=False,
    )(*arguments)


def specs(arrays: Any) -> Any:
    """Partition specs of arrays."""
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arrays)
