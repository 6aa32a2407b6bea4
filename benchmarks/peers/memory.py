"""Peak memory of an engine: as a worker after the rates, as a server after its clients."""

from __future__ import annotations

from benchmarks.machine import peak_memory
from benchmarks.peers.measures import Measures

PART = "memory"


def record_memory(measures: Measures, label: str, engine: str, pid: int) -> None:
    """Peak memory of the process and its descendants, while they still run."""
    measures.add(PART, f"peak memory, {label}", "MiB", engine, peak_memory(pid), is_higher_better=False)
