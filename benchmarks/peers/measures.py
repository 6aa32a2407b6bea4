"""A figure of several engines, one value a round; medians, ranges, and ratios of values of one round."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class EngineFigure:
    """`values`: engine -> one value a round, None where it gave none."""

    part: str  # part of the report
    label: str
    unit: str
    is_higher_better: bool
    values: dict[str, list[float | None]] = field(default_factory=dict)

    def add(self, engine: str, value: float | None) -> None:
        self.values.setdefault(engine, []).append(value)

    def spread(self, engine: str) -> Spread | None:
        """Over the rounds that gave a value; None where none did."""
        found = [v for v in self.values.get(engine, ()) if v is not None]
        return Spread.of(found) if found else None

    def best(self, engines: Collection[str]) -> str | None:
        """The engine of these with the best median."""
        medians = {name: spread.median for name in self.values if name in engines and (spread := self.spread(name))}
        if not medians:
            return None
        return (max if self.is_higher_better else min)(medians, key=lambda name: medians[name])

    def ratio(self, ours: str, peer: str) -> Spread | None:
        """How many times as good this engine is (over 1: better), each ratio of two values of one round; None where no
        round has both."""
        pairs = zip(self.values.get(ours, ()), self.values.get(peer, ()), strict=False)
        found = [(a, b) if self.is_higher_better else (b, a) for a, b in pairs if a is not None and b is not None]
        each = [above / below for above, below in found if below]
        return Spread.of(each) if each else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Measures:
    """All figures of a run, in the order of their first value."""

    found: dict[tuple[str, str], EngineFigure] = field(default_factory=dict)

    def add(self, part: str, label: str, unit: str, engine: str, value: float | None, *, is_higher_better: bool) -> None:
        """One more round's value."""
        measure = self.found.setdefault((part, label), EngineFigure(part, label, unit, is_higher_better))
        measure.add(engine, value)

    def of(self, part: str) -> list[EngineFigure]:
        return [m for m in self.found.values() if m.part == part]

    def as_json(self) -> list[dict[str, Any]]:
        return [m.as_json() for m in self.found.values()]

    @classmethod
    def from_json(cls, rows: Sequence[Mapping[str, Any]]) -> Measures:
        return cls({(row["part"], row["label"]): EngineFigure(**row) for row in rows})
