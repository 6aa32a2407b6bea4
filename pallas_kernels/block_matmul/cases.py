"""Shapes of real models, shared by tests and benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockMatmulCase:
    name: str
    num_rows: int
    num_inputs: int
    num_outputs: int
    num_matrices: int = 1


CASES = (
    BlockMatmulCase("llama 3.2 1b down, one row", 1, 1024, 128, 3),
    BlockMatmulCase("odd batch", 15, 512, 80),
    BlockMatmulCase("prefill of more rows than a chunk's", 261, 256, 48),
)
