"""KVManager: the one door to a pool's pages for everything on the host that needs them. Imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.radix_cache import CachedPage, RadixCache, digests, token_bytes
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.request import RequestContext

_SAVED_AT_ONCE = 4

SaveEvicted = Callable[[list[CachedPage]], None]


class KVManager:
    """Page tables of one mesh's pool. A page table is a list of page numbers that the sequence owns; every page in it holds one
    reference for that sequence. With a prefix cache, pages outlive their sequences until the room is needed.

    `session_seconds`: how long pages that a session used are kept ahead of others.
    """

    def __init__(
        self,
        spec: PageSpec,
        num_pages: int,
        *,
        prefix_cache: bool = True,
        session_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._allocator = PageAllocator(num_pages)
        self._cache = RadixCache(self._allocator, spec.page_size, clock) if prefix_cache else None
        self._session_seconds = session_seconds
        self._clock = clock
        self.save_evicted: SaveEvicted | None = None  # told of pages that are about to be used anew

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self._allocator.num_used

    @property
    def num_free(self) -> int:
        """Pages to be had: free ones, and those that only the prefix cache keeps."""
        return self._allocator.num_free + self._allocator.num_evictable

    @property
    def num_cached(self) -> int:
        """Pages that the prefix cache keeps, those that sequences hold among them."""
        return self._cache.num_pages if self._cache is not None else 0

    def take_cached(self, table: list[int], token_ids: Tokens[int], most_tokens: int, context: RequestContext) -> int:
        """Start an empty table with the cached pages of the longest known prefix, of at most `most_tokens`; returns the tokens they hold."""
        assert not table
        if self._cache is None or most_tokens < self.spec.page_size:
            return 0
        most_pages = most_tokens // self.spec.page_size
        tokens = token_bytes(token_ids[: most_pages * self.spec.page_size])
        pages = self._cache.match(tokens, context.namespace, most_pages, self._warm_until(context))
        self._allocator.retain(pages)
        table.extend(pages)
        return len(pages) * self.spec.page_size

    def grow(self, table: list[int], num_tokens: int, keep_free: int = 0) -> bool:
        """Extend a table until it holds `num_tokens`. False, and nothing changed, if that would leave fewer than `keep_free` pages."""
        missing = self.spec.pages_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if self.num_free - missing < keep_free:
            return False
        self._evict(missing - self._allocator.num_free)
        pages = self._allocator.allocate(missing)
        assert pages is not None
        table.extend(pages)
        return True

    def keep(self, table: list[int], token_ids: Tokens[int], num_tokens: int, context: RequestContext) -> None:
        """Let others find the whole pages of a table's first `num_tokens`, whose keys and values some step that was started writes.
        Where they are known already the table takes the pages that are."""
        num_pages = num_tokens // self.spec.page_size
        if self._cache is None or not num_pages:
            return
        tokens = token_bytes(token_ids[: num_pages * self.spec.page_size])
        self._cache.insert(tokens, context.namespace, table, num_pages, self._warm_until(context))

    def free(self, table: list[int]) -> None:
        """Give a table's pages back and empty it."""
        # The last first, so that of pages that nobody reads any more leaves come before what they grow from.
        self._allocator.release(reversed(table))
        table.clear()

    def missing(self, token_ids: Tokens[int], most_tokens: int, context: RequestContext) -> tuple[int, list[bytes]]:
        """How many leading whole pages of the first `most_tokens` are cached, and what names each page after those, with all before it.
        Marks nothing as used."""
        num_pages = most_tokens // self.spec.page_size
        tokens = token_bytes(token_ids[: num_pages * self.spec.page_size])
        held = 0 if self._cache is None else len(self._cache.match(tokens, context.namespace, num_pages, is_used=False))
        keys = digests(context.namespace, tokens, self.spec.page_size, num_pages)[held:] if held < num_pages else []
        return held, keys

    def forget(self) -> None:
        """Empty the prefix cache, all but the pages that sequences hold."""
        self._evict(self._allocator.num_evictable)

    def cached_pages(self) -> list[CachedPage]:
        """All that the prefix cache keeps: what would be evicted last comes first, a page before those that follow it."""
        return self._cache.pages() if self._cache is not None else []

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        assert self._cache is not None
        if self.save_evicted is None:
            self._cache.evict(count)
        else:
            # Saving costs a program's run, for one page as for four.
            self.save_evicted(self._cache.evict(max(count, _SAVED_AT_ONCE)))

    def _warm_until(self, context: RequestContext) -> float:
        return self._clock() + self._session_seconds if context.session is not None else 0.0
