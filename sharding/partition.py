"""From logical axes to shardings."""

from __future__ import annotations

from collections.abc import Sequence

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
