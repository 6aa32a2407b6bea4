"""The best tiling of each kernel and size, stored beside the kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report

FOLDER = Path(__file__).resolve().parents[2] / "pallas_kernels" / "tuned"


def best(report: Report) -> list[dict[str, Any]]:
    """The fastest correct tiling of each kernel and size, with the number that was tried."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    tried: dict[tuple[str, str], int] = {}
    for row in report.rows:
        if row.found.times is None or "tiling" not in row.found.notes:
            continue
        key = (row.measure.name, row.found.case)
        tried[key] = tried.get(key, 0) + 1
        entry = {
            "kernel": row.measure.name,
            "shape": row.found.notes["shape"],
            "tiling": row.found.notes["tiling"],
            "microseconds": round(row.found.times.median * 1e6, 2),
        }
        if key not in found or entry["microseconds"] < found[key]["microseconds"]:
            found[key] = entry
    return [entry | {"tried": tried[key]} for key, entry in found.items()]


def write(report: Report, folder: Path) -> str:
    """Writes `<card>.json`: entries of the same kernels and shapes are replaced, the others stay. Returns a summary of
    what it did."""
    entries = best(report)
    if not entries:
        return "no tiling was measured"
    path = folder / f"{report.card}.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else []
    new = [(entry["kernel"], entry["shape"]) for entry in entries]
    kept = [entry for entry in kept if (entry["kernel"], entry["shape"]) not in new]
    about = {name: report.about.get(name) for name in ("card", "jax", "began")}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"entries": kept + entries}, indent=1) + "\n", encoding="utf-8")
    return f"{len(entries)} tilings into {path}"
