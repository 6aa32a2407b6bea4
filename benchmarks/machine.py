"""The machine, and its load from other processes meanwhile."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import psutil

SHORTEST = 1.0  # seconds


def machine() -> dict[str, Any]:
    """Its processor, the cores that this process may use, and Python's version."""
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cpu": cpu[0] if cpu else platform.processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def machine_slug(about: dict[str, Any]) -> str:
    """Its name for a file's name: 'amd-epyc-2-cores', followed by the accelerator where `about` has one."""
    words = re.sub(r"\(.*?\)|@.*|\bprocessor\b|\bcpu\b", " ", about["cpu"].lower())
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {about['cores']} cores {about.get('accelerator', '').lower()}").strip("-")


class BackgroundLoad:
    """Cores that processes other than this one and its children kept busy, a hypervisor's share included. `samples` has
    a value for each interval of a second or more that was recorded: the underlying clock ticks a hundred times a
    second."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self.samples: list[float] = []
        self.look()

    def look(self) -> None:
        """Begins an interval."""
        self._since = (time.perf_counter(), _machine_seconds(), self._own_seconds())

    def keep(self) -> None:
        """Ends the interval. (Time of a child that ended within it counts where its parent waited for it.)"""
        began, every, own = self._since
        self.look()
        now, every_now, own_now = self._since
        if now - began >= SHORTEST:
            self.samples.append(max((every_now - every) - (own_now - own), 0.0) / (now - began))

    def _own_seconds(self) -> float:
        total = 0.0
        for process in (self._own, *self._own.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:  # it ended meanwhile
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    # A guest's time is included in user's.
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times[:]) - idle)


def peak_memory(pid: int) -> float | None:
    """Peak resident MiB of the process and its descendants, mapped files included: the sum of each one's peak. None
    where the system doesn't report it (Linux does)."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        peaks = [_high_water_mark(process.pid) for process in family]
    except (psutil.Error, OSError):
        return None
    return None if None in peaks else sum(peak for peak in peaks if peak is not None)


def _high_water_mark(pid: int) -> float | None:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return None
