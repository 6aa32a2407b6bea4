"""PageAllocator: which pages of a pool are free, and how many sequences read each. Imports no JAX."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from jaxinfer.kv_cache.spec import NULL_PAGE


class PageAllocator:
    """Pages with reference counts. The null page is never given out. Lowest numbers go first, so that a prompt's pages lie
    together: gathering neighbours is twice as fast as gathering scattered pages on a CPU."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 1, num_pages
        self.num_pages = num_pages - 1  # that can be used
        self._free = list(range(NULL_PAGE + 1, num_pages))  # a heap
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """That many pages with one reference each, or None, and nothing taken, if there are not enough."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reader of each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reader less of each page; those with none left are free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if not self._references[page]:
                heapq.heappush(self._free, page)

    def references(self, page: int) -> int:
        """How many readers a page has."""
        return self._references[page]
