"""SharedTables: page tables that are kept for sequences to start from, for as long as nobody needs the room. Imports no JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.spec import NULL_PAGE


class SharedTables:
    """Each table holds one reference to each of its pages, under a name. The oldest is the first to be given up."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._tables: dict[Hashable, list[int]] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._tables

    def __getitem__(self, name: Hashable) -> list[int]:
        return self._tables[name]

    def pages(self) -> list[int]:
        """One entry for each reference."""
        return [page for table in self._tables.values() for page in table if page != NULL_PAGE]

    def add(self, name: Hashable, table: list[int]) -> None:
        """Share the pages of a sequence's table."""
        assert name not in self._tables, name
        self._allocator.retain(page for page in table if page != NULL_PAGE)
        self._tables[name] = list(table)

    def drop(self, name: Hashable) -> None:
        """Give a table's pages back, if it is still there."""
        # The last first, as sequences do: see `KVManager.free`.
        self._allocator.release(page for page in reversed(self._tables.pop(name, ())) if page != NULL_PAGE)

    def num_reclaimable(self, spare: Hashable | None = None) -> int:
        """Pages that no sequence reads, and that would be free without all tables but the one to `spare`."""
        references = Counter(page for name, table in self._tables.items() if name != spare for page in table if page != NULL_PAGE)
        return sum(self._allocator.references(page) == count for page, count in references.items())

    def drop_oldest(self, spare: Hashable | None = None) -> None:
        """Give up the table that was shared first, but for the one to `spare`."""
        self.drop(next(name for name in self._tables if name != spare))
