"""Definitions of a measurement and its result. Imports no JAX."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.gpu.roofline import RooflineWork

Library = Literal["jax", "torch"]  # a process uses the GPU with one of them


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one call: the median of several measurements, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> CallTimes:
        """Raises `ValueError` where the median is not above zero: the work was too short for the clock."""
        median = statistics.median(seconds)
        if not median > 0:
            raise ValueError(f"{median:.1e} s a call: too short to be measured so")
        return cls(median, min(seconds), max(seconds))


@dataclass(frozen=True)
class RowResult:
    """A row of the result."""

    case: str
    times: CallTimes | None = None
    work: RooflineWork | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # numbers and words beside the time
    failure: str | None = None
    took_s: float | None = None  # since the measure began, with compilation
    is_silent: bool = False  # it gave no answer within its limit: usually a kernel that waits for ever

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GpuMeasure:
    """One thing to run, in a process that may be killed over it. `run` yields its rows as they come."""

    name: str  # such as 'paged_attention'
    way: str  # implementation, such as 'mosaic_gpu'
    case: str  # its sizes; '' where the rows name theirs
    run: Callable[[], Iterator[RowResult]]
    limit_s: float
    library: Library = "jax"

    @property
    def key(self) -> str:
        return "/".join(part for part in (self.name, self.way, self.case) if part)


def seconds(value: float) -> str:
    """With a unit that needs few digits."""
    return f"{value * 1e6:.1f} us" if value < 1e-3 else f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"
