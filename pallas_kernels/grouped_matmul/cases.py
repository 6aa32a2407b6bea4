"""Shapes of real models, shared by tests, tuner and benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["bfloat16", "int4", "fp8", "lossless"]


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """A layer's experts, each a matrix of `inputs` by `outputs`. The layer's other product has them exchanged. Each
    token goes to `experts_per_token` experts."""

    name: str
    num_experts: int
    experts_per_token: int
    inputs: int
    outputs: int
    format: FormatName


CASES = (
    ExpertsCase("llama-4-scout", 16, 1, 5120, 8192, "bfloat16"),
    ExpertsCase("qwen3-235b", 128, 8, 4096, 1536, "bfloat16"),
    ExpertsCase("deepseek-v3", 256, 8, 7168, 2048, "fp8"),
    ExpertsCase("kimi-k2.5", 384, 8, 7168, 2048, "int4"),
    ExpertsCase("llama-3.1-8b", 1, 1, 4096, 14336, "lossless"),  # no experts: a linear layer is one
)
TINY = tuple(ExpertsCase(f"tiny {name}", 5, 2, 256, 256, name) for name in ("bfloat16", "int4", "fp8"))
TINY_LOSSLESS = ExpertsCase("tiny lossless", 5, 2, 256, 256, "lossless")
