"""Arrays that are sharded over the vocabulary, and the collectives that make results of the whole."""

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
    """One device's shard, inside of `shard_over_vocab`. Shards are of one size and in the order of their tokens."""

    axis: str | None = None  # of the mesh, that shards lie on; None: this one is the whole
    num_shards: int = 1

    @property
    def is_whole(self) -> bool:
        return self.axis is None

    def all_gather(self, x: Shaped[Array, "..."]) -> Shaped[Array, "P ..."]:
        """Every shard's."""
        return x[None] if self.axis is None else jax.lax.all_gather(x, self.axis)

    def all_sum(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Over the shards, in their order: so all devices agree to the last bit, which an all-reduce doesn't promise."""
        return x if self.axis is None else self.all_gather(x).sum(0)

    def all_max(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Of all shards."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def places(self, tokens: Int[Array, "..."], size: int) -> Int[Array, "..."]:
        """Of tokens in this shard, of that size; those of other shards are past its end."""
        if self.axis is None:
            return tokens
        place = tokens - self.first(size)
        return jnp.where(place < 0, size, place)  # a negative one would count from the end

    def first(self, size: int) -> Int[Array, ""]:
        """The first token of this shard, of that size."""
        return jnp.int32(0) if self.axis is None else jax.lax.axis_index(self.axis) * size


WHOLE = VocabShard()


def split_axis(x: Shaped[Array, "..."], dimension: int) -> str | None:
    """The mesh axis over whose devices a dimension is split; None where they are one, or it isn't split."""
    sharding = jax.typeof(x).sharding
    axis = sharding.spec[dimension]
    return None if axis is None or sharding.mesh.shape[axis] == 1 else axis


def shard_over_vocab(function: Callable[..., Any], x: Shaped[Array, "..."], dimension: int, *arguments: Any, out_specs: Any = None) -> Any:
    """`function(shard, *arguments)` on every device, where arrays that are split, as x is along that dimension, are the device's own shards. What
    it returns is the same on all devices, unless out_specs says otherwise. Where nothing is split it is a plain call."""
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
    """How each lies on the mesh."""
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arrays)
