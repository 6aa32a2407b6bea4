"""KVManager: the one door to a pool's pages for everything on the host that needs them. Imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Tokens

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.radix_cache import CachedBlock, RadixCache, digests, token_bytes
from jaxinfer.kv_cache.shared_tables import SharedTables
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from jaxinfer.request import RequestContext

_SAVED_AT_ONCE = 4

SaveEvicted = Callable[[list[CachedBlock]], None]


class KVManager:
    """Page tables of one mesh's pool. A page table is a list of page numbers that the sequence owns; every page in it holds one
    reference for that sequence. It is flat: a run's pages, one for each group of layers, then the next run's. NULL_PAGE stands where a
    bounded group needs no page: behind its span, or too far ahead. With a prefix cache, pages outlive their sequences until the room is
    needed.

    `session_seconds`: how long pages that a session used are kept ahead of others. `chunk_size`: the most tokens that are computed at once.
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
    ) -> None:
        self.spec = spec
        self._allocator = PageAllocator(num_pages)
        self._cache = RadixCache(self._allocator, spec.page_size, clock, spec.spans) if prefix_cache else None
        self._shared = SharedTables(self._allocator)
        self._bounds = [(group, most) for group in range(spec.num_groups) if (most := spec.max_blocks(group, chunk_size)) is not None]
        self._session_seconds = session_seconds
        self._clock = clock
        # Of tables, by identity: how many runs `_insert_more` has made known, and the last one's node.
        self._inserted: dict[int, tuple[int, CachedBlock]] = {}
        self.save_evicted: SaveEvicted | None = None  # told of pages that are about to be used anew

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_used(self) -> int:
        """Pages that sequences hold, and shared tables."""
        return self._allocator.num_used

    @property
    def num_free(self) -> int:
        """Pages to be had: free ones, and those that only the prefix cache keeps."""
        return self._allocator.num_free + self._allocator.num_evictable

    @property
    def num_cached(self) -> int:
        """Pages that the prefix cache keeps, those that sequences hold among them."""
        return self._cache.num_pages if self._cache is not None else 0

    def match_prefix(self, table: list[int], token_ids: Tokens[int], max_tokens: int, context: RequestContext) -> int:
        """Start an empty table with the cached pages of the longest known prefix, of at most `max_tokens`; returns the tokens they hold."""
        assert not table
        if self._cache is None or max_tokens < self.spec.page_size:
            return 0
        tokens = token_bytes(token_ids[: max_tokens // self.spec.page_size * self.spec.page_size])
        found = self._cache.match(tokens, context.namespace, max_tokens // self.spec.page_size, self._warm_until(context))
        self._allocator.retain(page for page in found if page != NULL_PAGE)
        table.extend(found)
        return self.num_tokens(table)

    def num_tokens(self, table: list[int]) -> int:
        """That a page table is long enough for."""
        return len(table) // self.spec.num_groups * self.spec.page_size

    def grow(self, table: list[int], num_tokens: int, reserved_pages: int = 0, filled: int = 0) -> bool:
        """Extend a table until it holds `num_tokens`. Bounded groups get the pages that the next chunk needs, after what the table holds and
        the `filled` tokens that come computed, and the others as it goes on (`advance`). False, and nothing changed, if that would leave
        fewer than `reserved_pages` runs' pages."""
        spec, num_groups = self.spec, self.spec.num_groups
        first, last = len(table) // num_groups, spec.blocks_for(num_tokens)
        if last <= first:
            return True
        begins, ends = [first] * num_groups, [last] * num_groups
        for group, most in self._bounds:
            held = spec.first_run(group, max(first * spec.page_size, filled))  # from here on, what of it the table has counts too
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

    def share(self, name: Hashable, table: list[int]) -> None:
        """Keep a table's pages for sequences that start with the same tokens (`fork`), until `unshare` or until the room is needed."""
        self._shared.add(name, table)

    def unshare(self, name: Hashable) -> None:
        """Nobody starts from these pages any more."""
        self._shared.drop(name)

    def is_shared(self, name: Hashable) -> bool:
        """Whether there are pages to start from under this name."""
        return name in self._shared

    def fork(self, name: Hashable, table: list[int], num_tokens: int, reserved_pages: int = 0) -> list[tuple[int, int]] | None:
        """Start an empty table with the shared pages of `num_tokens`; where the last one of a group is not full, with one of its own in its
        place. Returns which pages are to be copied to which. None, and nothing changed, if that would leave fewer than `reserved_pages` runs'
        pages."""
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
        """Whether so many pages are to be had. Where it takes that, shared tables are given up, but for the one to `spare`."""
        while self.num_free < num_pages:
            if self.num_free + self._shared.num_reclaimable(spare) < num_pages:
                return False
            self._shared.drop_oldest(spare)
        return True

    def advance(self, table: list[int], token_ids: Tokens[int], start: int, end: int, context: RequestContext) -> bool:
        """Before tokens `start` to `end` are computed: bounded groups leave behind what these don't attend to, for others to find, and get
        pages for these. False if there are none; what was left behind stays so."""
        if not self._bounds:
            return True
        behind = {group: self._behind(table, group, start) for group, _ in self._bounds}
        if any(behind.values()):
            self._insert_more(table, token_ids, start, context)
        needed: list[int] = []
        spare: list[int] = []
        for group, _ in self._bounds:
            self._give_back(table, behind[group])
            ahead = self._ahead(table, group, start)
            num_needed = len(range(ahead.start, self.spec.blocks_for(end) * self.spec.num_groups, self.spec.num_groups))
            needed += ahead[:num_needed]
            spare += ahead[num_needed : len(behind[group])]  # as many as it had, so that it seldom depends on what others took meanwhile
        places = [*needed, *spare] if len(needed) + len(spare) <= self.num_free else needed
        if not self._find_room(len(places)):
            return False
        for place, page in zip(places, self._allocate(len(places)), strict=True):
            table[place] = page
        return True

    def begin_anew(self, table: list[int], token_ids: Tokens[int], num_cached: int, filled: int, context: RequestContext) -> None:
        """For a table that was just begun with `num_cached` tokens, and of which more, `filled`, are to come computed: bounded groups have
        their pages from those on."""
        if self._bounds:
            num_tokens = self.num_tokens(table)
            self.free(table)
            self.match_prefix(table, token_ids, num_cached, context)
            has_room = self.grow(table, num_tokens, filled=filled)
            assert has_room, "it needs no more pages than it had"

    def release_outside_window(self, table: list[int], num_tokens: int) -> None:
        """Give back what bounded groups hold before the spans of the token after so many on."""
        for group, _ in self._bounds:
            self._give_back(table, self._behind(table, group, num_tokens))

    def _behind(self, table: list[int], group: int, num_tokens: int) -> list[int]:
        """A group's places that have a page though the tokens after so many on don't attend to it."""
        places: list[int] = []
        num_runs = len(table) // self.spec.num_groups
        place = (min(self.spec.first_run(group, num_tokens), num_runs) - 1) * self.spec.num_groups + group
        while place >= 0 and table[place] != NULL_PAGE:  # those before are gone already
            places.append(place)
            place -= self.spec.num_groups
        return places

    def _ahead(self, table: list[int], group: int, num_tokens: int) -> range:
        """A group's places after those that have a page, from the spans of the token after so many on."""
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

    def insert(self, table: list[int], token_ids: Tokens[int], num_tokens: int, context: RequestContext) -> None:
        """Let others find the whole pages of a table's first `num_tokens`, whose keys and values some step that was started writes.
        Where they are known already the table takes the pages that are."""
        num_runs = num_tokens // self.spec.page_size
        if self._cache is None or not num_runs:
            return
        tokens = token_bytes(token_ids[: num_runs * self.spec.page_size])
        self._cache.insert(tokens, context.namespace, table, num_runs, self._warm_until(context))

    def _insert_more(self, table: list[int], token_ids: Tokens[int], num_tokens: int, context: RequestContext) -> None:
        """As `insert`, of a table that grows chunk by chunk: from where the last call ended."""
        if self._cache is None:
            return
        size, num_runs = self.spec.page_size, num_tokens // self.spec.page_size
        after = self._inserted.pop(id(table), None)
        if after is not None and not self._cache.has(after[1]):
            after = None
        tokens = token_bytes(token_ids[(after[0] if after else 0) * size : num_runs * size])
        node = self._cache.insert(tokens, context.namespace, table, num_runs, self._warm_until(context), after)
        if node is not None:
            self._inserted[id(table)] = num_runs, node

    def free(self, table: list[int]) -> None:
        """Give a table's pages back and empty it."""
        self._inserted.pop(id(table), None)
        # The last first, so that of pages that nobody reads any more leaves come before what they grow from.
        self._allocator.release(page for page in reversed(table) if page != NULL_PAGE)
        table.clear()

    def missing(self, token_ids: Tokens[int], max_tokens: int, context: RequestContext) -> tuple[int, list[bytes]]:
        """How many leading whole pages of the first `max_tokens` are cached, and what names each page after those, with all before it.
        Marks nothing as used."""
        num_pages = max_tokens // self.spec.page_size
        tokens = token_bytes(token_ids[: num_pages * self.spec.page_size])
        held = 0 if self._cache is None else len(self._cache.match(tokens, context.namespace, num_pages, is_used=False))
        keys = digests(context.namespace, tokens, self.spec.page_size, num_pages)[held:] if held < num_pages else []
        return held, keys

    def forget(self) -> None:
        """Empty the prefix cache, all but the pages that sequences hold."""
        self._evict(self._allocator.num_evictable)

    def cached_pages(self) -> list[CachedBlock]:
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
