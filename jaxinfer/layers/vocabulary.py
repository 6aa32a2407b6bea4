"""Arrays over a vocabulary that is split over devices, a part each: what they must tell each other to speak of the whole."""

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
class Part:
    """One device's part, inside of `over_parts`. Parts are of one size and in the order of their tokens."""

    axis: str | None = None  # of the mesh, that parts lie on; None: this one is the whole
    num_parts: int = 1

    @property
    def is_whole(self) -> bool:
        return self.axis is None

    def gathered(self, x: Shaped[Array, "..."]) -> Shaped[Array, "P ..."]:
        """Every part's."""
        return x[None] if self.axis is None else jax.lax.all_gather(x, self.axis)

    def summed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Over the parts, in their order: so all devices agree to the last bit, which an all-reduce doesn't promise."""
        return x if self.axis is None else self.gathered(x).sum(0)

    def highest(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Of all parts."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def places(self, tokens: Int[Array, "..."], size: int) -> Int[Array, "..."]:
        """Of tokens in this part, of that size; those of other parts are past its end."""
        if self.axis is None:
            return tokens
        place = tokens - self.first(size)
        return jnp.where(place < 0, size, place)  # a negative one would count from the end

    def first(self, size: int) -> Int[Array, ""]:
        """The first token of this part, of that size."""
        return jnp.int32(0) if self.axis is None else jax.lax.axis_index(self.axis) * size


WHOLE = Part()


def split_axis(x: Shaped[Array, "..."], dimension: int) -> str | None:
    """The mesh axis over whose devices a dimension is split; None where they are one, or it isn't split."""
    sharding = jax.typeof(x).sharding
    axis = sharding.spec[dimension]
    return None if axis is None or sharding.mesh.shape[axis] == 1 else axis


def over_parts(function: Callable[..., Any], x: Shaped[Array, "..."], dimension: int, *arguments: Any, out_specs: Any = None) -> Any:
    """`function(part, *arguments)` on every device, where arrays that are split, as x is along that dimension, are the device's own parts. What
    it returns is the same on all devices, unless out_specs says otherwise. Where nothing is split it is a plain call."""
    axis = split_axis(x, dimension)
    if axis is None:
        return function(WHOLE, *arguments)
    mesh = jax.typeof(x).sharding.mesh
    return jax.shard_map(
        partial(function, Part(axis, mesh.shape[axis])),
        mesh=mesh,
        in_specs=specs(arguments),
        out_specs=PartitionSpec() if out_specs is None else out_specs,
        check_vma=False,
    )(*arguments)


def specs(arrays: Any) -> Any:
    """How each lies on the mesh."""
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arrays)
