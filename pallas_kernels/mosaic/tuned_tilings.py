"""The fastest tilings on a GPU, as `python -m benchmarks.gpu --tune` stores them in
pallas_kernels/tuned/<card>.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pallas_kernels.mosaic.card import target_device

_FOLDER = Path(__file__).parents[1] / "tuned"
# a tiling may be used for nearby values of these; all else must be equal
_SIZES = ("batch", "context", "tokens", "rows")


def tuned_tiling(kernel: str, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fields of the kernel's tiling that were the fastest for the nearest shape, on the GPU that is compiled for; None
    where no comparable shape was measured on it."""
    alike = [e for e in _entries(target_device().device_kind) if e["kernel"] == kernel and _distance(e["shape"], shape) < math.inf]
    return min(alike, key=lambda e: _distance(e["shape"], shape))["tiling"] if alike else None


def _distance(measured: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Doublings between two shapes' sizes; infinite where they differ in kind."""
    if measured.keys() != wanted.keys() or any(measured[key] != wanted[key] for key in measured.keys() - set(_SIZES)):
        return math.inf
    return sum(abs(math.log2(measured[key] / wanted[key])) for key in _SIZES if key in measured)


@cache
def _entries(device_kind: str) -> list[dict[str, Any]]:
    """The entries of the GPU's file. A GPU's description may say more than its name: 'NVIDIA H200 141GB HBM3e'."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    for path in sorted(_FOLDER.glob("*.json")):
        if f"{name}-".startswith(f"{path.stem}-"):
            entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"]
            return entries
    return []
