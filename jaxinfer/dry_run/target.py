"""What a model may be laid out on: so many of one card in one machine, or this machine's processor."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from checkpoints.user_folders import cache_folder
from jaxinfer.config import ConfigError
from jaxinfer.plan import CPU_KV_BYTES
from sharding.hardware import HARDWARE, Hardware
from sharding.targets import card_memory, known_cards

CPU = "cpu"
# Of each card, what no compiled program shows: the driver's context, loaded kernels, buffers for collectives. Set aside, not measured.
_RESERVED_BYTES = 3 * 2**29


@dataclass(frozen=True)
class Target:
    """So many of one card in one machine, such as '8xh100'; or this machine's processor, 'cpu', or cut into virtual devices, '4xcpu'."""

    card: str
    num_devices: int

    @classmethod
    def of(cls, name: str) -> Target:
        """Raises `ConfigError` for what is no such name."""
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
        """Of each device; of virtual ones their share of the machine's."""
        if self.is_cpu:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.num_devices
        return card_memory(self.card)

    @property
    def reserved_bytes(self) -> int:
        """Of each device, set aside for what no program shows."""
        return 0 if self.is_cpu else _RESERVED_BYTES

    @property
    def kv_bytes(self) -> int | None:
        """Of each device, that an engine takes for pages unless it is told otherwise; None: whatever all else leaves."""
        return CPU_KV_BYTES if self.is_cpu else None

    @property
    def hardware(self) -> Hardware:
        """What each device does while all others work too: of a CPU that has been calibrated, as it was measured."""
        path = calibration_path(self.card)
        known = Hardware.read(path) if path.exists() else HARDWARE[self.card]
        return known.shared_by(self.num_devices)


def calibration_path(card: str) -> Path:
    """Where what was measured of a card is kept: the folder `hardware` of the cache."""
    return cache_folder() / "hardware" / f"{card}.json"
