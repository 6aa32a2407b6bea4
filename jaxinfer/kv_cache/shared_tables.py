"""SharedTables: page tables kept for later forks of a prompt, until the pages are needed. Imports no JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.spec import NULL_PAGE


class SharedTables:
    """Named page tables, each with one reference to each of its pages. The oldest is dropped first."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._tables: dict[Hashable, list[int]] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._tables

    def __getitem__(self, name: Hashable) -> list[int]:
        return self._tables[name]

    def pages(self) -> list[int]:
        """All pages, one entry for each reference."""
        return [page for table in self._tables.values() for page in table if page != NULL_PAGE]

    def add(self, name: Hashable, table: list[int]) -> None:
        """Share the pages of a sequence's table."""
        assert name not in self._tables, name
        self._allocator.retain(page for page in table if page != NULL_PAGE)
        self._tables[name] = list(table)

    def drop(self, name: Hashable) -> None:
        """Release a table's pages, if it is still here."""
        # Last pages first, as for sequences: see `KVManager.free`.
        self._allocator.release(page for page in reversed(self._tables.pop(name, ())) if page != NULL_PAGE)

    def num_reclaimable(self, spare: Hashable | None = None) -> int:
        """Pages that only these tables reference, not counting the table `spare`."""
        references = Counter(page for name, table in self._tables.items() if name != spare for page in table if page != NULL_PAGE)
        return sum(self._allocator.references(page) == count for page, count in references.items())

    def drop_oldest(self, spare: Hashable | None = None) -> None:
        """Drop the table that was added first, except `spare`."""
        self.drop(next(name for name in self._tables if name != spare))

    def drop_all(self) -> None:
        """Release all tables' pages."""
        for name in list(self._tables):
            self.drop(name)
