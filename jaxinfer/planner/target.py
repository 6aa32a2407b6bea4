"""Targets: a number of GPUs of one kind in a machine, or this machine's processor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from checkpoints.user_folders import cache_folder
from jaxinfer.config import ConfigError
from jaxinfer.planner.kv_memory import CPU_KV_BYTES, machine_bytes
from sharding.hardware import HARDWARE, Hardware
from sharding.targets import card_memory, known_cards

CPU = "cpu"
# On each card, memory that no compiled program shows: the driver's context, loaded kernels, buffers of collectives. An
# allowance, not measured.
_RESERVED_BYTES = 3 * 2**29


@dataclass(frozen=True)
class Target:
    """A number of cards in a machine, such as '8xh100'; or this machine's processor, 'cpu', or as virtual devices,
    '4xcpu'."""

    card: str
    num_devices: int

    @classmethod
    def of(cls, name: str) -> Target:
        """Raises `ConfigError` for any other name."""
        match = re.fullmatch(r"(?:(\d+)x)?(\w+)", name.strip().lower())
        known = match is not None and match[2] in (*known_cards(), CPU) and int(match[1] or 1) >= 1
        if match is None or not known or (match[1] is None and match[2] != CPU):
            raise ConfigError(
                f"target is {name!r}: it must be a number and a card, such as 8xh100; known are {', '.join(known_cards())}, and {CPU}, this machine's"
            )
        return cls(match[2], int(match[1] or 1))

    def __str__(self) -> str:
        return self.card if self.is_cpu and self.num_devices == 1 else f"{self.num_devices}x{self.card}"

    @property
    def is_cpu(self) -> bool:
        return self.card == CPU

    @property
    def memory_bytes(self) -> int:
        """Of each device; virtual devices share the machine's memory."""
        if self.is_cpu:
            return machine_bytes() // self.num_devices
        return card_memory(self.card)

    @property
    def reserved_bytes(self) -> int:
        """Of each device, for what no compiled program shows."""
        return 0 if self.is_cpu else _RESERVED_BYTES

    @property
    def kv_bytes(self) -> int | None:
        """On each device, the default limit of an engine for pages; None: no limit."""
        return CPU_KV_BYTES if self.is_cpu else None

    @property
    def hardware(self) -> Hardware:
        """Speed of each device while all of them work; a calibrated CPU's is measured."""
        path = calibration_path(self.card)
        known = Hardware.read(path) if path.exists() else HARDWARE[self.card]
        return known.shared_by(self.num_devices)


def calibration_path(card: str) -> Path:
    """File with a card's measurements, in the folder `hardware` of the cache."""
    return cache_folder() / "hardware" / f"{card}.json"
