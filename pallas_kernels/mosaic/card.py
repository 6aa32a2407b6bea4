"""What kernels for Mosaic GPU need to know of the card that they are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.lib import cuda_versions  # None where JAX has no CUDA

_OLDEST = 9.0  # compute capability: older cards have no copy engine that tiles of shared memory come by
# A card that is not here, but compiled for, is only known by its name. Four generations are called RTX: what a name doesn't tell apart is the oldest
# of them, for which there is no kernel.
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
)  # versions of CUDA, 12.8.0 to 12.9.0, whose ptxas gets causal masks wrong, by the notes of JAX's own kernel
_SMALL = 101_376  # bytes of shared memory of a block on 12.x; on 9.0 to 11.0 it is
_LARGE = 232_448  # (CUDA C++ Programming Guide, technical specifications per compute capability)


@dataclass(frozen=True)
class Card:
    """Of compute capability 9.0 or newer."""

    has_wgmma: bool  # products that a warpgroup starts and that run by themselves: on 9.0 alone
    shared_memory: int  # bytes that a block can have
    multiprocessors: int  # as many blocks run at a time, for a block has most of a multiprocessor's registers


HOPPER = Card(True, _LARGE, 132)  # H100 and H200


def compiled_for() -> Any:
    """The device that is being compiled for; without a mesh the process' own."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def card_of(device: Any) -> Card:
    """Of a device, abstract or not; what kernels are interpreted on is taken for a Hopper GPU."""
    capability = capability_of(device)
    if capability is None:
        return HOPPER
    number = getattr(device, "core_count", None) or getattr(device, "num_cores", None) or HOPPER.multiprocessors
    return Card(capability == "9.0", _SMALL if float(capability) >= 12 else _LARGE, number)


def capability_of(device: Any) -> str | None:
    """Its compute capability, such as '9.0'; None for what has none, or does not say."""
    if found := getattr(device, "compute_capability", None):
        return str(found)
    kind = device.device_kind
    for local in jax.devices():
        if local.device_kind == kind and (found := getattr(local, "compute_capability", None)):
            return str(found)
    return next((capability for name, capability in _BY_NAME.items() if re.search(name, kind)), None)


def miscompiled_reason(version: int | None = None) -> str | None:
    """Why attention with a causal mask inside of tiles is not compiled by this CUDA, such as 12080 for 12.8.0 (JAX's own if not given); None if
    it can be."""
    if version is None:
        version = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    if version not in _MISCOMPILED:
        return None
    return f"its kernel is miscompiled by CUDA {version // 1000}.{version % 1000 // 10}: use 12.9.1 or newer, or one before 12.8"


def unsupported_reason(device: Any) -> str | None:
    """Why no kernel for Mosaic GPU runs on this GPU; None if they do."""
    found = capability_of(device)
    return None if found and float(found) >= _OLDEST else f"its kernels are for compute capability {_OLDEST} and newer, not {found}"
