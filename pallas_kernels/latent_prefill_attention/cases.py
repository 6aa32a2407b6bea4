"""Shapes of real models, shared by tests, tuner and benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentPrefillCase:
    """One prefill step's attention. A latent has `rank` columns to expand and `rope_size` columns that heads share.
    `rows` holds (tokens already cached, tokens of this step) for each request."""

    name: str
    num_heads: int
    rank: int
    nope_size: int
    rope_size: int
    value_size: int
    page_size: int
    num_tokens: int
    query_tile: int
    rows: tuple[tuple[int, int], ...]


CASES = (
    LatentPrefillCase("deepseek-v3-on-64-devices", 2, 512, 128, 64, 128, 16, 128, 32, ((0, 40), (17, 5), (200, 32))),
    LatentPrefillCase("one-token", 4, 32, 16, 8, 16, 8, 32, 32, ((0, 1),)),
    LatentPrefillCase("small-tile", 3, 24, 10, 6, 12, 4, 16, 8, ((3, 8), (130, 7))),
    LatentPrefillCase("a-long-chunk", 2, 32, 16, 8, 16, 16, 1024, 32, ((700, 1000),)),
)
