"""Shapes of real models, shared by tests, tuner and benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One decode step's attention: `context` holds the tokens cached for each request, the new one included."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    context: tuple[int, ...]


CASES = (
    DecodeCase("smollm2-135m", 9, 3, 64, 16, (1, 15, 16, 17, 40, 129)),
    DecodeCase("llama-3.1-8b", 32, 8, 128, 16, (33, 128, 130)),
    DecodeCase("multi-head", 4, 4, 64, 8, (5, 64)),
    DecodeCase("one-kv-head", 8, 1, 96, 32, (31, 32, 33)),
)
