"""Results as JSON, rewritten after each row, and as a table."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import peak_rates
from benchmarks.gpu.measure import seconds
from benchmarks.gpu.roofline import CardRates, RooflineWork
from benchmarks.gpu.worker import About, Row

_MAX_FAILURE_CHARACTERS = 140  # of a failure's message in the table
_UNSHOWN = ("shape", "tokens", "program", "programs")


@dataclass
class Report:
    """The results of a run so far."""

    settings: Mapping[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def card(self) -> str:
        """Its name for a file's name: 'nvidia-h200'."""
        return re.sub(r"[^a-z0-9]+", "-", str(self.about.get("card", "unknown card")).lower()).strip("-")

    def add(self, said: Row | About) -> None:
        if isinstance(said, Row):
            self.rows.append(said)
        else:
            self.about |= said

    def rates(self) -> CardRates | None:
        """The best rates that were measured of the GPU itself; None until both were."""
        found: dict[str, list[float]] = {peak_rates.COPY: [], peak_rates.MATMUL: []}
        for row in self.rows:
            times, work = row.found.times, row.found.work
            if row.measure.name in found and times is not None and work is not None:
                amount = work.num_bytes if row.measure.name == peak_rates.COPY else work.num_flops
                found[row.measure.name].append(amount / times.median)
        copy, matmul = found.values()
        return CardRates(max(copy), max(matmul)) if copy and matmul else None

    def as_json(self) -> dict[str, Any]:
        rates = self.rates()
        return {
            "about": self.about,
            "settings": dict(self.settings),
            "ceilings": None if rates is None else {"bytes_per_s": rates.bytes_per_s, "flops_per_s": rates.flops_per_s},
            "rows": [_row_json(row, rates) for row in self.rows],
        }

    def write(self, path: Path) -> None:
        """Replaces the file atomically: a kill leaves the old or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)

    def table(self) -> str:
        """A line a row, then what has no result, a line for each reason."""
        rates = self.rates()
        head: tuple[str, ...] = ("what", "way", "size", "time", "spread", "rate", "share", "notes")
        lines = [head, *((*_cells(row, rates), self._notes(row)) for row in self.rows if row.found.failure is None)]
        failed = _failures(self.rows)
        return "\n".join([_aligned(lines), *(["", "without a result:", *failed] if failed else [])])

    def _notes(self, row: Row) -> str:
        notes = [f"{name.replace('_', ' ')} {_short(value)}" for name, value in row.found.notes.items() if name not in _UNSHOWN]
        return ", ".join([*notes, *self._likeness(row)])

    def _likeness(self, row: Row) -> list[str]:
        """How many of its tokens equal those of the implementation that was measured first. A model's random weights
        leave logits close together."""
        for other in self.rows:
            is_same_work = (other.measure.name, other.found.case) == (row.measure.name, row.found.case)
            if is_same_work and "tokens" in other.found.notes and "tokens" in row.found.notes:
                if other is row:
                    return []
                pairs = list(zip(row.found.notes["tokens"], other.found.notes["tokens"], strict=True))
                return [f"{sum(a == b for a, b in pairs)} of {len(pairs)} tokens as {other.measure.way}'s"]
        return []


def _row_json(row: Row, rates: CardRates | None) -> dict[str, Any]:
    found = row.found.as_json() | {"name": row.measure.name, "way": row.measure.way}
    times, work = row.found.times, row.found.work
    if rates is not None and times is not None and work is not None:
        found |= {"floor_s": rates.floor(work), "bound": rates.bound(work), "share": rates.share(work, times.median)}
    return found


def _cells(row: Row, rates: CardRates | None) -> tuple[str, ...]:
    found = row.found
    time = spread = rate = share = ""
    if found.times is not None:
        median = found.times.median
        time = seconds(median)
        spread = f"{found.times.low / median:.2f}-{found.times.high / median:.2f}"
        if found.work is not None:
            rate = _rate(found.work, median, rates)
            share = "" if rates is None else f"{rates.share(found.work, median):.0%} of {rates.bound(found.work)}"
    return row.measure.name, row.measure.way, found.case, time, spread, rate, share


def _rate(work: RooflineWork, time: float, rates: CardRates | None) -> str:
    is_copy = work.num_flops == 0 or (rates is not None and rates.bound(work) == "copy")
    if is_copy:
        return f"{work.num_bytes / time / 1e9:,.0f} GB/s"
    rate = work.num_flops / time
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:,.1f} GFLOP/s"


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def _failures(rows: Sequence[Row]) -> list[str]:
    """A line for each reason and implementation, with the number of its sizes."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.found.failure is not None:
            reasons.setdefault((row.measure.name, row.measure.way, row.found.failure), []).append(row.found.case)
    return [f"  {name} / {way}{_sizes(sizes)}: {why[:_MAX_FAILURE_CHARACTERS]}" for (name, way, why), sizes in reasons.items()]


def _sizes(cases: Sequence[str]) -> str:
    """In brackets; empty for a measure without sizes."""
    named = [case for case in cases if case]
    return f" ({'; '.join(named) if len(named) < 3 else f'{len(named)} sizes'})" if named else ""


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
