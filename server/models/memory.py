"""Bytes that a model takes on a device while it is awake."""

from __future__ import annotations

from jaxinfer.stats import EngineStats

SHARE = 0.85  # of a device's memory for models that are awake, by default; the rest is for temporaries


def bytes_awake(stats: EngineStats) -> int:
    """Weights and KV pages on the device that has the most of this engine's."""
    parts: dict[str, int] = {}
    for part, num_bytes in stats.memory.items():
        for kind in (" weights", " KV pages"):
            if part.endswith(kind) and part != "embedding weights":
                mesh = part.removesuffix(kind)
                parts[mesh] = parts.get(mesh, 0) + num_bytes
    return max(parts.values(), default=0)


def default_room(device_bytes: int, num_bytes: list[int]) -> int:
    """Of a device with so much memory: a share of it, and at least what the largest model takes by itself."""
    return max(int(device_bytes * SHARE), *num_bytes)
