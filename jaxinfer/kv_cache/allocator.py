"""PageAllocator: free pages of a pool, reference counts, and which pages are cached. Imports no JAX."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from jaxinfer.kv_cache.spec import NULL_PAGE


class PageAllocator:
    """Pages with reference counts. A page is free when no sequence references it and the prefix cache doesn't have it;
    a cached page without references is evictable. The null page is never allocated. Lowest numbers are allocated first,
    so that a prompt's pages are neighbours: gathering those is twice as fast on a CPU."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 1, num_pages
        self.num_pages = num_pages - 1  # without the null page
        self.num_evictable = 0  # cached, and referenced by no sequence
        self.when_evictable: Callable[[int], None] | None = None  # called for each page that becomes evictable
        self._free = list(range(NULL_PAGE + 1, num_pages))  # a heap
        self._references = [0] * num_pages  # of sequences
        self._is_cached = [False] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that sequences reference, including shared cached ones; not evictable ones."""
        return self.num_pages - len(self._free) - self.num_evictable

    def allocate(self, count: int) -> list[int] | None:
        """This many free pages with one reference each; None, with nothing allocated, if there are not enough."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; a cached page may have had none."""
        for page in pages:
            if not self._references[page]:
                assert self._is_cached[page], f"page {page} is free"
                self.num_evictable -= 1
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page. A page without references is free, or evictable if it is cached."""
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
        """Mark a referenced page as cached."""
        assert self._references[page] > 0, f"page {page} has no reader: its contents may be anything"
        assert not self._is_cached[page], f"page {page} is kept already"
        self._is_cached[page] = True

    def drop(self, page: int) -> None:
        """Unmark a cached page: it is free as soon as no sequence references it."""
        assert self._is_cached[page], f"page {page} is not kept"
        self._is_cached[page] = False
        if not self._references[page]:
            self.num_evictable -= 1
            heapq.heappush(self._free, page)

    def references(self, page: int) -> int:
        """The number of a page's references."""
        return self._references[page]

    def is_cached(self, page: int) -> bool:
        """Whether a page is in the prefix cache."""
        return self._is_cached[page]
