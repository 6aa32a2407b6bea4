"""What a result records of a program that XLA compiled: its launches, the algorithms chosen for products, its text.
Imports no JAX."""

from __future__ import annotations

import base64
import gzip
import re
from collections import Counter
from typing import Any

_LAUNCH = re.compile(r'^.*? (?:fusion|custom-call)\(.*?(?:kind=(k\w+)|custom_call_target="([^"]*)")', re.MULTILINE)
_COMPUTATION = re.compile(r"^(ENTRY )?%?[\w.-]+ \(.*\{$", re.MULTILINE)
# The choices of cuBLAS, cuDNN and Triton: a number, a plan, tile sizes.
_ALGORITHM = re.compile(
    r'"(?:selected_algorithm|plan_id)":"?-?\d+"?|"(?:triton_gemm_config|block_level_fusion_config)":\{(?:[^{}]|\{[^{}]*\})*\}'
)


def launches(hlo: str) -> dict[str, dict[str, int]]:
    """The number of launches of each kind in the program itself (`entry`) and in what it calls, such as loops and
    branches, each counted once (`called`). `hlo` is the text of an optimised module."""
    found: dict[str, Counter[str]] = {"entry": Counter(), "called": Counter()}
    for part, body in _computations(hlo):
        found[part].update(kind or target for kind, target in _LAUNCH.findall(body))
    return {part: dict(kinds) for part, kinds in found.items()}


def num_launches(hlo: str) -> int:
    """Launches of a program, without those of what it calls."""
    return sum(launches(hlo)["entry"].values())


def algorithms(hlo: str) -> dict[str, int]:
    """How often each choice was made; empty where nothing was tuned, as in a program compiled without a GPU."""
    return dict(Counter(_ALGORITHM.findall(hlo)))


def describe_program(hlo: str) -> dict[str, Any]:
    """Notes for a result. `hlo` is the gzipped text as base64: `gzip.decompress(base64.b64decode(hlo))` restores it."""
    text = base64.b64encode(gzip.compress(hlo.encode(), mtime=0)).decode()
    return {"launches": launches(hlo), "algorithms": algorithms(hlo), "hlo": text}


def _computations(hlo: str) -> list[tuple[str, str]]:
    starts = list(_COMPUTATION.finditer(hlo))
    ends = [found.start() for found in starts[1:]] + [len(hlo)]
    return [("entry" if found[1] else "called", hlo[found.end() : end]) for found, end in zip(starts, ends, strict=True)]
