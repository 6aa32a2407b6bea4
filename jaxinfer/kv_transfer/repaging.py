"""Repaging: pages of one size, read as pages of another. Imports no JAX.

Two engines of one model may have different numbers of tokens in a page: a kernel of one's card wants larger ones, or
its latents are shared out over more devices. Who sends makes the pages that were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.kv_cache.spec import PageSpec


@dataclass(frozen=True)
class Repaging:
    """`own`: of the pages that there are, `asked`: of those that are wanted. They differ in `page_size` only."""

    own: PageSpec
    asked: PageSpec

    def __post_init__(self) -> None:
        assert replace(self.own, page_size=self.asked.page_size) == self.asked, (self.own, self.asked)

    def sources(self, place: int) -> range:
        """Places in the own page table of all pages that have tokens of a wanted one, some of which may be none."""
        groups = self.own.num_groups
        block, group = divmod(place, groups)
        first = block * self.asked.page_size // self.own.page_size
        last = ((block + 1) * self.asked.page_size - 1) // self.own.page_size
        return range(first * groups + group, last * groups + group + 1, groups)

    def page(self, place: int, pages: Mapping[int, np.ndarray]) -> np.ndarray:
        """A wanted page, uint8[bytes], from own ones by their places, uint8[bytes] each. Tokens of those that are
        missing are zeros: nobody attends to them."""
        asked = np.zeros(self._shape(self.asked), np.uint8)
        start, end = self._tokens(self.asked, place)
        for source in self.sources(place):
            if (page := pages.get(source)) is not None:
                own_start, own_end = self._tokens(self.own, source)
                low, high = max(start, own_start), min(end, own_end)
                asked[:, low - start : high - start] = page.reshape(self._shape(self.own))[:, low - own_start : high - own_start]
        return asked.reshape(-1)

    @staticmethod
    def _shape(spec: PageSpec) -> tuple[int, int, int]:
        """Layers, sides and heads; tokens; bytes of a head."""
        return spec.num_layers * spec.num_sides * spec.num_kv_heads, spec.page_size, spec.head_size * spec.bytes_per_value

    @staticmethod
    def _tokens(spec: PageSpec, place: int) -> tuple[int, int]:
        block = place // spec.num_groups
        return block * spec.page_size, (block + 1) * spec.page_size
