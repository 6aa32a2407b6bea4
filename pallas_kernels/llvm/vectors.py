"""Texts of vectors' constants in LLVM IR."""

from __future__ import annotations

from collections.abc import Iterable


def indices(places: Iterable[int]) -> str:
    """The elements of a `shufflevector`'s mask."""
    return ", ".join(f"i32 {place}" for place in places)
