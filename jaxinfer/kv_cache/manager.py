"""KVManager: the one door to a pool's pages for everything on the host that needs them. Imports no JAX."""

from __future__ import annotations

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.sequence import SharedPrefix


class KVManager:
    """Page tables of one mesh's pool. A page table is a list of page numbers that the sequence owns; every page in it holds one
    reference for that sequence."""

    def __init__(self, spec: PageSpec, num_pages: int) -> None:
        self.spec = spec
        self._allocator = PageAllocator(num_pages)

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_used(self) -> int:
        return self._allocator.num_used

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def grow(self, table: list[int], num_tokens: int, keep_free: int = 0) -> bool:
        """Extend a table until it holds `num_tokens`. False, and nothing changed, if that would leave fewer than `keep_free` pages."""
        missing = self.spec.pages_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if self._allocator.num_free - missing < keep_free:
            return False
        pages = self._allocator.allocate(missing)
        assert pages is not None
        table.extend(pages)
        return True

    def free(self, table: list[int]) -> None:
        """Give a table's pages back and empty it."""
        self._allocator.release(table)
        table.clear()

    def share(self, prefix: SharedPrefix, table: list[int], num_tokens: int) -> None:
        """Keep the whole pages of a prompt's first `num_tokens` for the request's other sequences. The last token is left out:
        each sequence must compute at least one to sample from."""
        prefix.pages = table[: (num_tokens - 1) // self.spec.page_size]
        prefix.is_ready = True
        self._allocator.retain(prefix.pages)

    def take_shared(self, prefix: SharedPrefix, table: list[int]) -> int:
        """Start a table with the shared pages; returns the tokens they hold."""
        assert not table
        self._allocator.retain(prefix.pages)
        table.extend(prefix.pages)
        self.leave(prefix)
        return len(table) * self.spec.page_size

    def leave(self, prefix: SharedPrefix) -> None:
        """One sequence needs the shared pages no more; after the last they are given back."""
        prefix.num_sharers -= 1
        if prefix.num_sharers <= 0:
            self.unshare(prefix)

    def unshare(self, prefix: SharedPrefix) -> None:
        """Give the shared pages back at once: sequences that have not taken them compute the prompt themselves."""
        self._allocator.release(prefix.pages)
        prefix.pages = []
