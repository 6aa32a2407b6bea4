"""Shapes of real models, shared by tests, tuner and benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["bfloat16", "int4", "fp8"]


@dataclass(frozen=True, slots=True)
class Case:
    """A layer's experts: `inputs` to `outputs` each; its other product has them exchanged. Each token goes to `experts_per_token`."""

    name: str
    num_experts: int
    experts_per_token: int
    inputs: int
    outputs: int
    format: FormatName


CASES = (
    Case("llama-4-scout", 16, 1, 5120, 8192, "bfloat16"),
    Case("qwen3-235b", 128, 8, 4096, 1536, "bfloat16"),
    Case("deepseek-v3", 256, 8, 7168, 2048, "fp8"),
    Case("kimi-k2.5", 384, 8, 7168, 2048, "int4"),
)
TINY = tuple(Case(f"tiny {name}", 5, 2, 256, 256, name) for name in ("bfloat16", "int4", "fp8"))
