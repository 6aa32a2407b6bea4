"""Shapes of real models, shared by tests, tuner and benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedMatmulCase:
    name: str
    num_rows: int
    num_inputs: int
    num_outputs: int
    num_matrices: int = 1


CASES = (
    PackedMatmulCase("smollm2-135m qkv, one row", 1, 576, 960, 3),
    PackedMatmulCase("smollm2-135m out, two rows", 2, 576, 576, 3),
    PackedMatmulCase("smollm2-135m down, odd batch", 15, 1536, 576),
    PackedMatmulCase("smollm2-135m gate and up, batch 32", 32, 576, 3072),
    PackedMatmulCase("prefill of more rows than a chunk's", 261, 576, 960),
    PackedMatmulCase("one panel", 33, 64, 16),
    PackedMatmulCase("one group of inputs", 9, 4, 112),
    PackedMatmulCase("minilm up", 129, 384, 1536),
)
