"""From logical axes to shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import Rules


def partition_spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """Logical axes -> mesh axes, None where the rules name none."""
    return PartitionSpec(*(rules.get(axis) if axis is not None else None for axis in axes))


def named_sharding(mesh: Mesh, rules: Rules, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
    """The sharding of an array of this shape. Raises `ValueError`, naming `what`, if an axis does not divide evenly."""
    spec = partition_spec(axes, rules)
    for axis, size, mesh_axis in zip(axes, shape, spec, strict=True):
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise ValueError(
                f"{what}: its {axis} axis of {size} can't be split over {mesh.shape[mesh_axis]} devices; use a number of devices that divides {size}"
            )
    return NamedSharding(mesh, spec)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(values: Any, sharding: NamedSharding) -> Any:
    """A pytree of host arrays on a mesh. Where some of its devices are other processes', each process fills its own from the same values;
    `device_put` would first compare all of them over the network."""
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.tree.map(lambda value: jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]), values)


def move(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array of one mesh on another. Where devices are of several processes, each moves what its own devices have; raises `ValueError` where
    those of the target need what only other processes' have: no launch of a program would say who sends it when."""
    if sharding.is_fully_addressable and array.is_fully_addressable:
        return jax.device_put(array, sharding)
    held = [(_bounds(shard.index, array.shape), shard.data) for shard in array.addressable_shards]
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        wanted = _bounds(index, array.shape)
        for has, data in held:
            if all(a <= c and d <= b for (a, b), (c, d) in zip(has, wanted, strict=True)):
                inside = tuple(slice(c - a, d - a) for (a, _), (c, d) in zip(has, wanted, strict=True))
                pieces.append(jax.device_put(data if has == wanted else data[inside], device))
                break
        else:
            raise ValueError(f"{device} needs a part that no device of its process has")
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def _bounds(index: tuple[slice, ...] | None, shape: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where, in each dimension."""
    return [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True)]
