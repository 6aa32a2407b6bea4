"""What kernels for Mosaic GPU need to know of the GPU that they are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.lib import cuda_versions  # None where JAX has no CUDA

_OLDEST = 9.0  # compute capability: older GPUs have no copy engine for tiles of shared memory
# A target GPU that is not installed is known by its name alone. Four generations are called RTX: an ambiguous name
# means the oldest of them, which has no kernel.
_BY_NAME = {
    r"\b(H100|H200|H800|H20|GH200)\b": "9.0",
    r"\bG?B(100|200)\b": "10.0",
    r"\bG?B300\b": "10.3",
    r"\bRTX PRO \d+\b|\bRTX 50\d\d\b": "12.0",
    r"\bRTX \d+ Ada\b|\bRTX 40\d\d\b": "8.9",
    r"\bRTX A\d+\b|\bRTX 30\d\d\b": "8.6",
    r"\bRTX\b": "7.5",
}
_MISCOMPILED = range(
    12080, 12091
)  # versions of CUDA, 12.8.0 to 12.9.0, whose ptxas miscompiles causal masks, according to JAX's own kernel
_SMALL = 101_376  # bytes of shared memory of a block on 12.x; on 9.0 to 11.0 it is
_LARGE = 232_448  # (CUDA C++ Programming Guide, technical specifications per compute capability)


@dataclass(frozen=True)
class Card:
    """A GPU of compute capability 9.0 or newer."""

    has_wgmma: bool  # asynchronous products of a warpgroup: on 9.0 alone
    shared_memory: int  # bytes of a block
    multiprocessors: int  # as many blocks run at a time: a block uses most of a multiprocessor's registers


HOPPER = Card(True, _LARGE, 132)  # H100 and H200


def target_device() -> Any:
    """The device that is compiled for; without a mesh the process' own."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def card_for(device: Any) -> Card:
    """The properties of a device, abstract or not. Interpreted kernels run as on a Hopper GPU."""
    capability = compute_capability(device)
    if capability is None:
        return HOPPER
    number = getattr(device, "core_count", None) or getattr(device, "num_cores", None) or HOPPER.multiprocessors
    return Card(capability == "9.0", _SMALL if float(capability) >= 12 else _LARGE, number)


def compute_capability(device: Any) -> str | None:
    """A device's compute capability, such as '9.0'; None where it has none or reports none."""
    if found := getattr(device, "compute_capability", None):
        return str(found)
    kind = device.device_kind
    for local in jax.devices():
        if local.device_kind == kind and (found := getattr(local, "compute_capability", None)):
            return str(found)
    return next((capability for name, capability in _BY_NAME.items() if re.search(name, kind)), None)


def miscompiled_reason(version: int | None = None) -> str | None:
    """Why this version of CUDA, such as 12080 for 12.8.0, can't compile attention with a causal mask inside of tiles;
    None if it can. The default is the version that JAX uses."""
    if version is None:
        version = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    if version not in _MISCOMPILED:
        return None
    return f"its kernel is miscompiled by CUDA {version // 1000}.{version % 1000 // 10}: use 12.9.1 or newer, or one before 12.8"


def unsupported_reason(device: Any) -> str | None:
    """Why no kernel for Mosaic GPU runs on this GPU; None if they do."""
    found = compute_capability(device)
    return None if found and float(found) >= _OLDEST else f"its kernels are for compute capability {_OLDEST} and newer, not {found}"
