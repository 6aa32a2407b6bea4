"""KVManager: the host's only interface to a pool's pages. Imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.block_keys import TokenHistory, block_keys, digests
from jaxinfer.kv_cache.events import CacheEvents
from jaxinfer.kv_cache.radix_cache import CachedBlock, RadixCache
from jaxinfer.kv_cache.shared_tables import SharedTables
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from jaxinfer.request import RequestContext

_SAVED_AT_ONCE = 4

SaveEvicted = Callable[[list[CachedBlock]], None]


class KVManager:
    """Page tables of one mesh's pool. A page table is a list of page numbers that a sequence owns, with one reference
    to each page. It is flat: the pages of a token block, one for each group of layers, then the next block's.
    NULL_PAGE stands where a bounded group needs no page: behind its span, or too far ahead. With a prefix cache, pages
    outlive their sequences until they are evicted.

    `session_seconds`: for how long a session's pages are evicted after others. `chunk_size`: the most tokens computed
    at once. `events`: told of what the prefix cache has.
    """

    def __init__(
        self,
        spec: PageSpec,
        num_pages: int,
        *,
        prefix_cache: bool = True,
        session_seconds: float = 300.0,
        chunk_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
        events: CacheEvents | None = None,
    ) -> None:
        self.spec, self.events = spec, events
        self._allocator = PageAllocator(num_pages)
        self._cache = RadixCache(self._allocator, spec.page_size, clock, spec.spans, events) if prefix_cache else None
        self._shared = SharedTables(self._allocator)
        self._bounds = [(group, most) for group in range(spec.num_groups) if (most := spec.max_blocks(group, chunk_size)) is not None]
        self._session_seconds = session_seconds
        self._clock = clock
        # By a table's identity: how many blocks `_insert_more` has inserted, and the last one's node.
        self._inserted: dict[int, tuple[int, CachedBlock]] = {}
        self.save_evicted: SaveEvicted | None = None  # called with evicted pages, before they are reused

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_used(self) -> int:
        """Pages of sequences and of shared tables."""
        return self._allocator.num_used

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: free ones, and those that only the prefix cache has."""
        return self._allocator.num_free + self._allocator.num_evictable

    @property
    def num_cached(self) -> int:
        """Pages in the prefix cache, including those of sequences."""
        return self._cache.num_pages if self._cache is not None else 0

    def match_prefix(self, table: list[int], history: TokenHistory, max_tokens: int) -> int:
        """Start an empty table with the cached pages of the longest known prefix, of at most `max_tokens`; returns
        the tokens they hold."""
        assert not table
        if self._cache is None or max_tokens < self.spec.page_size:
            return 0
        found = self._cache.match(self._keys(history, max_tokens), history.context.namespace, self._warm_until(history.context))
        self._allocator.retain(page for page in found if page != NULL_PAGE)
        table.extend(found)
        return self.num_tokens(table)

    def num_tokens(self, table: list[int]) -> int:
        """The capacity of a page table."""
        return len(table) // self.spec.num_groups * self.spec.page_size

    def grow(self, table: list[int], num_tokens: int, reserved_pages: int = 0, filled: int = 0) -> bool:
        """Extend a table to `num_tokens`. Bounded groups get the pages that the next chunk needs, after the table's
        tokens and the `filled` tokens that are already computed; `advance` adds the rest. False, with nothing changed,
        if fewer than `reserved_pages` blocks' pages would be left."""
        spec, num_groups = self.spec, self.spec.num_groups
        first, last = len(table) // num_groups, spec.blocks_for(num_tokens)
        if last <= first:
            return True
        begins, ends = [first] * num_groups, [last] * num_groups
        for group, most in self._bounds:
            # From here on, including the part that the table has already.
            held = spec.first_run(group, max(first * spec.page_size, filled))
            begins[group] = min(max(first, spec.first_run(group, filled)), last)
            ends[group] = max(begins[group], min(held + most, last))
        missing = sum(ends) - sum(begins)
        if not self._find_room(missing + reserved_pages * num_groups):
            return False
        pages = self._allocate(missing)
        if not self._bounds:
            table.extend(pages)
            return True
        self.release_outside_window(table, filled)
        left = iter(pages)
        for run in range(first, last):
            table.extend(next(left) if begin <= run < end else NULL_PAGE for begin, end in zip(begins, ends, strict=True))
        return True

    def adopt(self, table: list[int], pages: list[int]) -> None:
        """Fill an empty table with the pages of another; both then have references."""
        assert not table
        self._allocator.retain(page for page in pages if page != NULL_PAGE)
        table.extend(pages)

    def share(self, name: Hashable, table: list[int]) -> None:
        """Keep a table's pages for forks of its prompt (`fork`), until `unshare` or until the pages are needed."""
        self._shared.add(name, table)

    def unshare(self, name: Hashable) -> None:
        """Release pages that were kept for forks."""
        self._shared.drop(name)

    def is_shared(self, name: Hashable) -> bool:
        """Whether pages are kept under this name."""
        return name in self._shared

    def fork(self, name: Hashable, table: list[int], num_tokens: int, reserved_pages: int = 0) -> list[tuple[int, int]] | None:
        """Fill an empty table with the shared pages of `num_tokens`; a group's last page, if it isn't full, is replaced
        by a new one. Returns (source, target) pages to copy. None, with nothing changed, if fewer than
        `reserved_pages` blocks' pages would be left."""
        shared, num_groups = self._shared[name], self.spec.num_groups
        assert not table
        assert len(shared) == self.spec.blocks_for(num_tokens) * num_groups, "the prompt's pages and no more"
        partial = shared[-num_groups:] if num_tokens % self.spec.page_size else []
        if not self._find_room(len(partial) + reserved_pages * num_groups, spare=name):
            return None
        whole = shared[: len(shared) - len(partial)]
        self._allocator.retain(page for page in whole if page != NULL_PAGE)
        own = self._allocate(len(partial))
        table.extend([*whole, *own])
        return list(zip(partial, own, strict=True))

    def _find_room(self, num_pages: int, spare: Hashable | None = None) -> bool:
        """Whether this many pages can be allocated; drops shared tables if needed, except `spare`."""
        while self.num_free < num_pages:
            if self.num_free + self._shared.num_reclaimable(spare) < num_pages:
                return False
            self._shared.drop_oldest(spare)
        return True

    def advance(self, table: list[int], history: TokenHistory, start: int, end: int) -> bool:
        """Before tokens `start` to `end` are computed: bounded groups leave behind what these don't attend to, for
        others to find, and get pages for these. False if there are none; what was left behind stays so."""
        if not self._bounds:
            return True
        behind = {group: self._behind(table, group, start) for group, _ in self._bounds}
        if any(behind.values()):
            self._insert_more(table, history, start)
        needed: list[int] = []
        spare: list[int] = []
        for group, _ in self._bounds:
            self._give_back(table, behind[group])
            ahead = self._ahead(table, group, start)
            num_needed = len(range(ahead.start, self.spec.blocks_for(end) * self.spec.num_groups, self.spec.num_groups))
            needed += ahead[:num_needed]
            # As many as were released, so that later chunks seldom depend on what others allocated meanwhile.
            spare += ahead[num_needed : len(behind[group])]
        places = [*needed, *spare] if len(needed) + len(spare) <= self.num_free else needed
        if not self._find_room(len(places)):
            return False
        for place, page in zip(places, self._allocate(len(places)), strict=True):
            table[place] = page
        return True

    def begin_anew(self, table: list[int], history: TokenHistory, num_cached: int, filled: int) -> None:
        """For a table that was just begun with `num_cached` tokens, and of which more, `filled`, are to come
        computed: bounded groups have their pages from those on."""
        if self._bounds:
            num_tokens = self.num_tokens(table)
            self.free(table)
            self.match_prefix(table, history, num_cached)
            has_room = self.grow(table, num_tokens, filled=filled)
            assert has_room, "it needs no more pages than it had"

    def release_outside_window(self, table: list[int], num_tokens: int) -> None:
        """Release bounded groups' pages that tokens after the first `num_tokens` don't attend to."""
        for group, _ in self._bounds:
            self._give_back(table, self._behind(table, group, num_tokens))

    def can_rewrite(self, table: list[int], position: int, num_prompt: int) -> bool:
        """Whether the token at a position of a table, and all after it, may be computed again: their pages are no one
        else's, and bounded groups still have what they attend to. Pages of the first `num_prompt` tokens may be read
        by others that were forked from them."""
        num_groups = self.spec.num_groups
        place = position // self.spec.page_size * num_groups
        for page in table[place : place + num_groups]:
            if self._allocator.is_cached(page) or (position < num_prompt and self._allocator.references(page) > 1):
                return False
        return all(table[self.spec.first_run(group, position) * num_groups + group] != NULL_PAGE for group, _ in self._bounds)

    def truncate(self, table: list[int], num_tokens: int) -> None:
        """Give back a table's pages after those of its first `num_tokens`."""
        self._inserted.pop(id(table), None)
        end = self.spec.blocks_for(num_tokens) * self.spec.num_groups
        self._allocator.release(page for page in reversed(table[end:]) if page != NULL_PAGE)  # in `free`'s order
        del table[end:]

    def _behind(self, table: list[int], group: int, num_tokens: int) -> list[int]:
        """Indices of a group's pages that tokens after the first `num_tokens` don't attend to."""
        places: list[int] = []
        num_runs = len(table) // self.spec.num_groups
        place = (min(self.spec.first_run(group, num_tokens), num_runs) - 1) * self.spec.num_groups + group
        while place >= 0 and table[place] != NULL_PAGE:  # those before are gone already
            places.append(place)
            place -= self.spec.num_groups
        return places

    def _ahead(self, table: list[int], group: int, num_tokens: int) -> range:
        """A group's indices without a page yet, from the span of the token after the first `num_tokens` on."""
        place = self.spec.first_run(group, num_tokens) * self.spec.num_groups + group
        while place < len(table) and table[place] != NULL_PAGE:
            place += self.spec.num_groups
        return range(place, len(table), self.spec.num_groups)

    def _give_back(self, table: list[int], places: list[int]) -> None:
        self._allocator.release(table[place] for place in places)
        for place in places:
            table[place] = NULL_PAGE

    def _allocate(self, count: int) -> list[int]:
        self._evict(count - self._allocator.num_free)
        pages = self._allocator.allocate(count)
        assert pages is not None
        return pages

    def insert(self, table: list[int], history: TokenHistory, num_tokens: int) -> None:
        """Let others find the whole pages of a table's first `num_tokens`, whose keys and values some step that was
        started writes. Where they are known already the table takes the pages that are."""
        num_runs = num_tokens // self.spec.page_size
        if self._cache is None or not num_runs:
            return
        self._cache.insert(self._keys(history, num_tokens), history.context.namespace, table, num_runs, self._warm_until(history.context))

    def _insert_more(self, table: list[int], history: TokenHistory, num_tokens: int) -> None:
        """As `insert`, of a table that grows chunk by chunk: from where the last call ended."""
        if self._cache is None:
            return
        num_runs = num_tokens // self.spec.page_size
        after = self._inserted.pop(id(table), None)
        if after is not None and not self._cache.has(after[1]):
            after = None
        keys = self._keys(history, num_tokens, after[0] if after else 0)
        node = self._cache.insert(keys, history.context.namespace, table, num_runs, self._warm_until(history.context), after)
        if node is not None:
            self._inserted[id(table)] = num_runs, node

    def free(self, table: list[int]) -> None:
        """Release a table's pages and empty it."""
        self._inserted.pop(id(table), None)
        # The last first, so that among evictable pages leaves come before their parents.
        self._allocator.release(page for page in reversed(table) if page != NULL_PAGE)
        table.clear()

    def missing(self, history: TokenHistory, max_tokens: int) -> tuple[int, list[bytes]]:
        """How many leading whole pages of the first `max_tokens` are cached, and what names each page after those,
        with all before it. Marks nothing as used."""
        num_pages, namespace = max_tokens // self.spec.page_size, history.context.namespace
        keys = list(self._keys(history, max_tokens))
        held = 0 if self._cache is None else len(self._cache.match(keys, namespace, is_used=False))
        return held, digests(namespace, keys)[held:] if held < num_pages else []

    def cached_run(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of these blocks, by digest, up to the first one that isn't cached. Of a manager with `events`, and
        of one group of layers."""
        found: list[int] = []
        for key in keys:
            pages = None if self._cache is None else self._cache.pages_of(key)
            if pages is None or pages[0] == NULL_PAGE:
                break
            found.append(pages[0])
        return found

    def forget(self) -> None:
        """Empty the prefix cache, except pages of sequences."""
        self._evict(self._allocator.num_evictable)

    def invalidate(self) -> None:
        """Empty the prefix cache, and save nothing of it: what the pages hold is no longer right. No sequence may have
        any."""
        self._shared.drop_all()
        saves, self.save_evicted = self.save_evicted, None
        self.forget()
        self.save_evicted = saves
        assert not self.num_used and not self.num_cached, "a sequence still has pages"

    def cached_pages(self) -> list[CachedBlock]:
        """All nodes of the prefix cache, in reverse order of eviction; parents before children."""
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

    def _keys(self, history: TokenHistory, num_tokens: int, first: int = 0) -> Iterator[bytes]:
        """Of the whole blocks of so many tokens, from a first block on."""
        return block_keys(history, self.spec.page_size, num_tokens // self.spec.page_size, first)

    def _warm_until(self, context: RequestContext) -> float:
        return self._clock() + self._session_seconds if context.session is not None else 0.0
