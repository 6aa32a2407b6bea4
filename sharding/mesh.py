"""Device meshes: one for each role (prefill, decode), over devices named by number."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharding.layout import missing_device

TENSOR = "tensor"  # the mesh axis that attention heads, MLP columns and the vocabulary are split over


def make_mesh(device_ids: Sequence[int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with one `tensor` axis over the devices with these indices in `devices` (default: `jax.devices()`).

    Raises `ValueError` for a device number that does not exist.
    """
    available = list(jax.devices() if devices is None else devices)
    if reason := missing_device(device_ids, len(available), available[0].platform):
        raise ValueError(reason)
    chosen = np.array([available[i] for i in device_ids])
    return Mesh(chosen, (TENSOR,), axis_types=(AxisType.Explicit,))


def is_cpu(mesh: Mesh) -> bool:
    """Whether a mesh's devices are the machine's own cores."""
    return bool(mesh.devices.flat[0].platform == "cpu")


def spans_processes(mesh: Mesh) -> bool:
    """Whether a mesh has devices of several processes, none of which can read all of an array that is split over it."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def own_device(mesh: Mesh) -> jax.Device:
    """The mesh's first device of this process, or its first device where the process has none."""
    devices = list(mesh.devices.flat)
    return next((device for device in devices if device.process_index == jax.process_index()), devices[0])
