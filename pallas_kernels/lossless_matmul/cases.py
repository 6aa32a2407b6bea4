"""Shapes of real models, shared by tests and benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LosslessMatmulCase:
    name: str
    num_rows: int
    num_inputs: int
    num_outputs: int
    num_matrices: int = 1


CASES = (
    LosslessMatmulCase("smollm2-135m qkv, one row", 1, 576, 960, 3),
    LosslessMatmulCase("smollm2-135m down, odd batch", 15, 1536, 576),
    LosslessMatmulCase("prefill of more rows than a chunk's", 261, 576, 960),
    LosslessMatmulCase("one panel, two rows", 2, 64, 16),
    LosslessMatmulCase("one step", 9, 4, 112),
)
