"""Tilings that were the quickest on a card, as `python -m benchmarks.gpu --tune` keeps them in pallas_kernels/tuned/<card>.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pallas_kernels.mosaic.card import compiled_for

_FOLDER = Path(__file__).parents[1] / "tuned"
_SIZES = ("batch", "context", "tokens", "rows")  # what a tiling follows from by and by; all else has to be the same


def tuned(kernel: str, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fields of the kernel's `Tiling` that were the quickest for the nearest shape, on the card that is being compiled for; None where no
    such shape was measured on it."""
    alike = [e for e in _entries(compiled_for().device_kind) if e["kernel"] == kernel and _distance(e["shape"], shape) < math.inf]
    return min(alike, key=lambda e: _distance(e["shape"], shape))["tiling"] if alike else None


def _distance(measured: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Doublings between two shapes' sizes; infinite where they differ in kind."""
    if measured.keys() != wanted.keys() or any(measured[key] != wanted[key] for key in measured.keys() - set(_SIZES)):
        return math.inf
    return sum(abs(math.log2(measured[key] / wanted[key])) for key in _SIZES if key in measured)


@cache
def _entries(device_kind: str) -> list[dict[str, Any]]:
    """Of the card's file. A description of a card may say more than its name: 'NVIDIA H200 141GB HBM3e'."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    for path in sorted(_FOLDER.glob("*.json")):
        if f"{name}-".startswith(f"{path.stem}-"):
            entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"]
            return entries
    return []
