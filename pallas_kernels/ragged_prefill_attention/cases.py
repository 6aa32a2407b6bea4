"""Shapes of real models, shared by tests, tuner and benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One prefill step's attention. `rows` holds (tokens already cached, tokens of this step) for each request."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    num_tokens: int
    query_tile: int
    rows: tuple[tuple[int, int], ...]


CASES = (
    PrefillCase("smollm2-135m", 9, 3, 64, 16, 128, 32, ((0, 40), (17, 5), (100, 32))),
    PrefillCase("llama-3.1-8b", 32, 8, 128, 16, 64, 32, ((0, 33),)),
    PrefillCase("one-token", 4, 2, 64, 8, 32, 32, ((0, 1),)),
    PrefillCase("small-tile", 4, 1, 64, 4, 16, 8, ((3, 8), (130, 7))),
)
