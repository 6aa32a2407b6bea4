"""From logical axes to shardings, and moves of arrays to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, reshard

from sharding.rules import Rules

Index = tuple[slice, ...]  # of a part of an array


def partition_spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """Logical axes -> mesh axes, None where the rules name none."""
    return PartitionSpec(*(rules.get(axis) if axis is not None else None for axis in axes))


def named_sharding(mesh: Mesh | AbstractMesh, rules: Rules, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
    """The sharding of an array of this shape. Raises `ValueError`, naming `what`, if an axis does not divide evenly."""
    spec = partition_spec(axes, rules)
    for axis, size, mesh_axis in zip(axes, shape, spec, strict=True):
        if mesh_axis is not None and size % (num_devices := mesh.shape[mesh_axis]):
            nearest = max(num for num in range(1, num_devices) if size % num == 0)
            raise ValueError(
                f"{what}: its {axis} axis of {size} can't be split over {num_devices} devices; use a number of devices that divides {size}, "
                f"such as {nearest}"
            )
    return NamedSharding(mesh, spec)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(values: Any, sharding: NamedSharding) -> Any:
    """A pytree of host arrays on a mesh. Where some of its devices belong to other processes, each process fills its
    own from the same values; `device_put` would first compare all of them over the network."""
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.tree.map(lambda value: jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]), values)


def move(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array of one mesh on another. Where the devices belong to several processes, each moves what its own have. If
    some need what only others' have, a program that every process must launch first makes the array whole on all
    devices of its mesh."""
    if sharding.is_fully_addressable and array.is_fully_addressable:
        return jax.device_put(array, sharding)
    sources = _sources(array.sharding, sharding, array.shape)
    if sources is None:
        assert isinstance(array.sharding, NamedSharding)
        # Waits until it is done: on a CPU its collective could otherwise meet another program's. Where a process has
        # one device of a mesh, XLA runs independent programs concurrently.
        array = jax.block_until_ready(reshard(array, NamedSharding(array.sharding.mesh, PartitionSpec())))
        sources = _sources(array.sharding, sharding, array.shape)
        assert sources is not None
    held = {shard.device: shard.data for shard in array.addressable_shards}
    pieces = [
        jax.device_put(held[source] if inside is None else held[source][inside], device)
        for device, (source, inside) in sources.items()
        if device in sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


@cache
def _sources(
    source: Sharding, target: Sharding, shape: tuple[int, ...]
) -> dict[jax.Device, tuple[jax.Device, tuple[slice, ...] | None]] | None:
    """For each of the target's devices a device of its process that has its part, and the part's indices there, None
    for the whole of it. None if some have no such device, in any process."""
    held: Mapping[Any, Any] = source.devices_indices_map(shape)
    wanted: Mapping[Any, Any] = target.devices_indices_map(shape)
    found: dict[jax.Device, tuple[jax.Device, tuple[slice, ...] | None]] = {}
    for device, index in wanted.items():
        near = [(other, within(has, index, shape)) for other, has in held.items() if other.process_index == device.process_index]
        have = [(other, inside) for other, inside in near if inside is not None]
        if not have:
            return None
        other, inside = have[0]
        found[device] = other, None if _bounds(held[other], shape) == _bounds(index, shape) else inside
    return found


def within(held: Index, wanted: Index, shape: Sequence[int]) -> tuple[slice, ...] | None:
    """The indices of one part of an array within another; None if it is not all within."""
    pairs = list(zip(_bounds(held, shape), _bounds(wanted, shape), strict=True))
    if any(c < a or b < d for (a, b), (c, d) in pairs):
        return None
    return tuple(slice(c - a, d - a) for (a, _), (c, d) in pairs)


def _bounds(index: Index, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Start and stop in each dimension."""
    return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
