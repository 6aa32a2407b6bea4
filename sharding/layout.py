"""The layout of a role's devices: tensor parallel within a stage, stages in a pipeline, whole experts a device. Imports
no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Device = TypeVar("Device")

_AXES = ("tp", "pp", "ep")


@dataclass(frozen=True, slots=True)
class Parallel:
    """A layout. Its devices are `pp` stages in order, each of `tp` devices."""

    tp: int = 1  # devices that every layer of a stage is split over
    pp: int = 1  # stages that the layers are cut into
    # devices over which whole experts are distributed: tp of them, or 1 where each device has its columns of every
    # expert
    ep: int = 1

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """'tp=2,pp=2'; axes that are not named are 1. Raises `ValueError` saying what is wrong."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, equals, size = (word.strip() for word in part.partition("="))
            if axis not in _AXES or not equals or not size.isdecimal() or int(size) < 1:
                raise ValueError(f"{part.strip()!r} is no part of a layout: give tp=N, pp=N or ep=N, N from 1, such as tp=2,pp=2")
            if axis in sizes:
                raise ValueError(f"{axis} is given twice: once is enough")
            sizes[axis] = int(size)
        found = cls(**sizes)
        if found.ep not in (1, found.tp):
            raise ValueError(
                f"ep is {found.ep}: experts are dealt out to the tp={found.tp} devices of a stage, so give ep={found.tp} or leave it out"
            )
        return found

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    def stages(self, devices: Sequence[Device]) -> list[Sequence[Device]]:
        """The devices of each stage."""
        return [devices[start : start + self.tp] for start in range(0, self.num_devices, self.tp)]

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in _AXES if axis == "tp" or getattr(self, axis) > 1)


def missing_device(device_ids: Sequence[int], num_devices: int, platform: str) -> str | None:
    """An error's text about devices that a machine with `num_devices` lacks; None if it has them all."""
    missing = [i for i in device_ids if i >= num_devices]
    if not missing:
        return None
    hint = "; --cpu-devices N splits the CPU into N virtual devices" if platform == "cpu" else ""
    return f"device {missing[0]} does not exist: this machine has {num_devices} {platform} device(s), numbered from 0{hint}"
