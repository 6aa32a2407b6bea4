"""Target GPUs: devices to compile programs for without the hardware, from public descriptions of the cards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import topologies

_FOLDER = Path(__file__).parent / "gpu_targets"
_FILES = {"h100": "h100_sxm.txtpb", "h200": "h200.txtpb", "b200": "b200.txtpb", "rtxpro6000": "rtxpro6000.txtpb"}


def known_cards() -> list[str]:
    """Names of the cards with a description."""
    return sorted(_FILES)


def card_memory(name: str) -> int:
    """Bytes of a card's memory."""
    found = re.search(r"device_memory_size: (\d+)", (_FOLDER / _FILES[name]).read_text())
    assert found is not None, name
    return int(found[1])


def target_devices(name: str, num_devices: int) -> Sequence[jax.Device]:
    """Devices of one machine with `num_devices` of these cards: programs compile for them, and never run.

    Raises `ValueError` for an unknown card; `RuntimeError` where JAX's CUDA plugin is not installed (extra `aot`).
    """
    if name not in _FILES:
        raise ValueError(f"no description of a {name}: there are {', '.join(_FILES)}")
    description = (_FOLDER / _FILES[name]).read_text()
    try:
        return topologies.get_topology_desc(platform="cuda", topology=f"1x1x{num_devices}", target_config=description).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RuntimeError(
            f"programs for a {name} can't be compiled here: {error}; install JAX's CUDA plugin: pip install 'jaxinfer[aot]'"
        ) from error
