"""PageAllocator: which pages of a pool are free, how many sequences read each, and which are kept for later. Imports no JAX."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from jaxinfer.kv_cache.spec import NULL_PAGE


class PageAllocator:
    """Pages with reference counts. A page is free when no sequence reads it and the prefix cache does not keep it: one that is only kept
    is evictable. The null page is never given out. Lowest numbers go first, so that a prompt's pages lie together: gathering neighbours
    is twice as fast as gathering scattered pages on a CPU."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 1, num_pages
        self.num_pages = num_pages - 1  # that can be used
        self.num_evictable = 0  # kept, and read by no sequence
        self.when_evictable: Callable[[int], None] | None = None  # told of each page that its last reader left and that is kept
        self._free = list(range(NULL_PAGE + 1, num_pages))  # a heap
        self._references = [0] * num_pages  # of sequences
        self._is_cached = [False] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that sequences read, the prefix cache's among them; not those that are merely kept."""
        return self.num_pages - len(self._free) - self.num_evictable

    def allocate(self, count: int) -> list[int] | None:
        """That many free pages with one reference each, or None, and nothing taken, if there are not enough."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reader of each page; a kept one may have had none."""
        for page in pages:
            if not self._references[page]:
                assert self._is_cached[page], f"page {page} is free"
                self.num_evictable -= 1
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reader less of each page; those with none left are free, or evictable if they are kept."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} has no reader"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if not self._is_cached[page]:
                heapq.heappush(self._free, page)
                continue
            self.num_evictable += 1
            if self.when_evictable is not None:
                self.when_evictable(page)

    def keep(self, page: int) -> None:
        """Keep a page that is being read beyond its last reader."""
        assert self._references[page] > 0, f"page {page} has no reader: its contents may be anything"
        assert not self._is_cached[page], f"page {page} is kept already"
        self._is_cached[page] = True

    def drop(self, page: int) -> None:
        """Keep a page no longer: it is free as soon as nobody reads it, perhaps at once."""
        assert self._is_cached[page], f"page {page} is not kept"
        self._is_cached[page] = False
        if not self._references[page]:
            self.num_evictable -= 1
            heapq.heappush(self._free, page)

    def references(self, page: int) -> int:
        """How many readers a page has."""
        return self._references[page]

    def is_cached(self, page: int) -> bool:
        """Whether the prefix cache keeps a page."""
        return self._is_cached[page]
