"""Measures that end well, badly and not at all, for a process of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.measure import CallTimes, GpuMeasure, Library, RowResult
from benchmarks.gpu.roofline import RooflineWork


def works(case: str = "") -> Iterator[RowResult]:
    yield RowResult(case, CallTimes(2.0, 1.0, 3.0), RooflineWork(8.0, 0.0), {"process": os.getpid()})


def works_half() -> Iterator[RowResult]:
    yield RowResult("first", CallTimes(1.0, 1.0, 1.0), RooflineWork(1.0, 1.0))
    raise ValueError("the second is\n too large")


def raises(error: type[Exception]) -> Iterator[RowResult]:
    raise error("no such kernel")
    yield


def crashes() -> Iterator[RowResult]:
    os._exit(3)
    yield


def hangs() -> Iterator[RowResult]:
    yield RowResult("first", CallTimes(1.0, 1.0, 1.0))
    time.sleep(600)


RUNS: dict[str, Any] = {
    "works": works,
    "works half": works_half,
    "value error": lambda: raises(ValueError),
    "runtime error": lambda: raises(RuntimeError),
    "not implemented": lambda: raises(NotImplementedError),
    "crashes": crashes,
    "hangs": hangs,
}


def catalog(names: tuple[str, ...], libraries: tuple[Library, ...], limit_s: float) -> list[GpuMeasure]:
    """Each is done in a way of its own, but for 'hangs', of which each is another size."""
    return [
        GpuMeasure(name, *(("one way", str(place)) if name == "hangs" else (str(place), "")), RUNS[name], limit_s, library)
        for place, (name, library) in enumerate(zip(names, libraries, strict=True))
    ]


def about() -> dict[str, Any]:
    return {"card": "made up"}


def absent() -> dict[str, Any]:
    raise ModuleNotFoundError("No module named 'torch'")


def dies_at_once() -> dict[str, Any]:
    os._exit(7)
