"""RadixCache: whose KV is in the pool already, by the keys of its blocks from the first on, and which pages go when
room is needed. Imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.block_keys import block_digest, encoded, namespace_digest
from jaxinfer.kv_cache.events import CacheEvents
from jaxinfer.kv_cache.spec import NULL_PAGE
from pallas_kernels.span import FULL_ATTENTION, Span


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A node of the tree: a block of tokens after its parent's, and the pages that hold them, one for each group of
    layers. NULL_PAGE: that of a bounded group, evicted or never computed. A namespace's root has the null page."""

    key: bytes  # see `block_keys`; of a root the namespace
    pages: list[int]
    parent: CachedBlock | None
    children: dict[bytes, CachedBlock] = field(default_factory=dict)
    last_used: int = 0  # by a logical clock that advances with every call of match or insert
    last_in_span: int = 0  # the same, for uses in which bounded groups' pages were needed
    warm_until: float = 0.0  # seconds, of the cache's clock
    queued: set[int] = field(default_factory=set)  # groups whose pages have their one entry in the order of eviction
    known_digest: bytes | None = None

    @property
    def page(self) -> int:
        """The page, for a model with one group."""
        return self.pages[0]

    @property
    def digest(self) -> bytes:
        """What `block_keys.digests` gives for this block; also for evicted ones."""
        missing, node = [], self
        while node.known_digest is None and node.parent is not None:
            missing.append(node)
            node = node.parent
        digest = node.known_digest = node.known_digest or namespace_digest(node.key)
        for node in reversed(missing):
            digest = node.known_digest = block_digest(digest, node.key)
        return digest


_Entry = tuple[float, int, int, int, int]  # warm until, last used, page, of which group, of which node


class RadixCache:
    """A tree of whole token blocks for each namespace. A page is locked while sequences reference it (see the
    allocator). Page tables are flat: each block's pages, one a group, block by block.

    A sequence that references an unbounded group's page references all pages before it: it takes them from the first
    on, and `insert` replaces pages that were computed twice. So the ancestors of a locked page are locked, and every
    other page can be evicted leaf by leaf. A bounded group's page (of a window or chunk) is needed only by tokens
    shortly after it: it can be evicted whenever it is unlocked, and a match ends where its whole span is cached. Thus
    `allocator.num_evictable` is exactly the number of pages that `evict` can free.

    `match` and `insert` take time in proportion to their blocks. Every evictable page has one entry in a heap, made
    when it became evictable. An entry that is out of date when it comes up is pushed again. So `evict` costs O(log
    pages) for each evicted page, and for each that was used since its entry was made.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
        spans: Sequence[Span] = (FULL_ATTENTION,),
        events: CacheEvents | None = None,
    ) -> None:
        self._events = events
        self._allocator = allocator
        self._page_size = page_size
        self._clock = clock
        self._spans = tuple(spans)
        self._num_groups = len(self._spans)
        self._bounded = [group for group, span in enumerate(self._spans) if span.size is not None]
        self._unbounded = [group for group, span in enumerate(self._spans) if span.size is None]
        self._tick = 0
        self._roots: dict[bytes, CachedBlock] = {}
        self._nodes: dict[int, CachedBlock] = {}  # by page
        self._by_digest: dict[bytes, CachedBlock] = {}  # where there are `events`: others may ask for them
        self._cold: list[tuple[_Entry, CachedBlock]] = []  # heaps of what _entry gives
        self._warm: list[tuple[_Entry, CachedBlock]] = []
        # The one place where references end tells: finished, preempted and aborted sequences are alike.
        allocator.when_evictable = self._when_evictable

    @property
    def num_pages(self) -> int:
        """Pages in the tree, locked ones included."""
        return len(self._nodes)

    def match(self, keys: Iterable[bytes], namespace: str, warm_until: float = 0.0, *, is_used: bool = True) -> list[int]:
        """The page table of the longest cached prefix of these blocks after which a sequence can continue, without
        pages of bounded groups that are out of its span. Marks the blocks as used (unless `is_used` is False); until
        `warm_until` they are evicted after all that are not warm. They aren't locked: retain them, from the first on,
        before the next `evict`."""
        self._tick += 1
        path = list[CachedBlock]()
        node = self._roots.get(encoded(namespace))
        for key in keys:
            node = node and node.children.get(key)
            if node is None:
                break
            path.append(node)
        firsts = [0] * self._num_groups
        if self._bounded:
            del path[self._num_usable(path) :]
            firsts = [span.first(len(path) * self._page_size) // self._page_size for span in self._spans]
        if is_used:
            in_span = min((firsts[group] for group in self._bounded), default=len(path))
            for run, node in enumerate(path):
                self._touch(node, warm_until, is_in_span=run >= in_span)
        if self._num_groups == 1 and not self._bounded:
            return [node.pages[0] for node in path]
        return [
            page if run >= first else NULL_PAGE for run, node in enumerate(path) for page, first in zip(node.pages, firsts, strict=True)
        ]

    def pages_of(self, digest: bytes) -> list[int] | None:
        """The pages of a block, None if it isn't cached. Only with `events`."""
        node = self._by_digest.get(digest)
        return None if node is None else node.pages

    def _num_usable(self, path: list[CachedBlock]) -> int:
        """The most blocks of a path after which a sequence can start."""
        usable, held = 0, [0] * self._num_groups
        for run, node in enumerate(path):
            reached = (run + 1) * self._page_size
            for group in self._bounded:
                held[group] = held[group] + 1 if node.pages[group] != NULL_PAGE else 0
            if all(held[group] > run - self._spans[group].first(reached) // self._page_size for group in self._bounded):
                usable = run + 1
        return usable

    def insert(
        self,
        keys: Iterable[bytes],
        namespace: str,
        table: list[int],
        num_runs: int,
        warm_until: float = 0.0,
        after: tuple[int, CachedBlock] | None = None,
    ) -> CachedBlock | None:
        """Insert the first `num_runs` blocks of a sequence's page table by their keys, as many; marks them as used, as
        `match` does. Returns the last block's node, or None if it stopped before. `after`: the number of blocks and the
        result of an earlier call; `keys` are then those after them.

        If the tree has another page of an unbounded group for a block, the table takes that one and releases its own.
        Steps that start later must therefore use the changed table.
        """
        first, node = after or (0, self._roots.get(encoded(namespace)))
        self._tick += 1
        num_groups = self._num_groups
        for i, key in zip(range(first, num_runs), keys, strict=True):
            if node is None:
                root = encoded(namespace)
                node = self._roots[root] = CachedBlock(root, [NULL_PAGE], None)
            at = i * num_groups
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = CachedBlock(key, [NULL_PAGE] * num_groups, node)
                if self._events is not None:
                    self._by_digest[child.digest] = child
                    self._events.inserted(child.digest)
            elif self._is_shared_copy(child, table, at):
                return None
            self._take_up(child, table, at)
            self._touch(child, warm_until, is_in_span=any(table[at + group] != NULL_PAGE for group in self._bounded))
            node = child
        if node is not None:  # it has no page where all groups are bounded and have left it behind
            self._prune(node, self._clock())
        return node

    def has(self, node: CachedBlock) -> bool:
        """Whether a node is still in the tree; then its ancestors are too."""
        return node.parent is None or node.parent.children.get(node.key) is node

    def _is_shared_copy(self, node: CachedBlock, table: list[int], at: int) -> bool:
        """Whether forks reference the table's own page of this block: they would then reference pages after it without
        the tree's pages before them."""
        return any(
            node.pages[group] not in (table[at + group], NULL_PAGE) and self._allocator.references(table[at + group]) > 1
            for group in self._unbounded
        )

    def _take_up(self, node: CachedBlock, table: list[int], at: int) -> None:
        """Add the table's pages to a node that lacks them; replace the table's pages of unbounded groups by the
        node's."""
        allocator = self._allocator
        for group in range(self._num_groups):
            page, known = table[at + group], node.pages[group]
            if page in (known, NULL_PAGE):
                continue
            if known == NULL_PAGE:
                allocator.keep(page)
                node.pages[group] = page
                self._nodes[page] = node
            elif self._spans[group].size is None:
                allocator.retain([known])
                allocator.release([page])
                table[at + group] = known

    def evict(self, count: int) -> list[CachedBlock]:
        """Free this many pages (a few more if a leaf has several), or all that are unlocked; returns their nodes. The
        least recently used leaf goes first, then its parent once that is a leaf; pages of bounded groups go by their
        last use within a span. Warm ones go last, in the order in which their time ends."""
        evicted: list[CachedBlock] = []
        now, num_freed = self._clock(), 0
        while num_freed < count and (found := self._pop(now)) is not None:
            node, group = found
            is_leaf = self._spans[group].size is None
            num_freed += sum(self._drop(node, dropped) for dropped in (range(self._num_groups) if is_leaf else (group,)))
            evicted.append(node)
            self._prune(node, now)
        return evicted

    def _drop(self, node: CachedBlock, group: int) -> int:
        page = node.pages[group]
        if page == NULL_PAGE:
            return 0
        del self._nodes[page]
        self._allocator.drop(page)
        if self._num_groups > 1 or self._bounded:
            node.pages[group] = NULL_PAGE
        return 1

    def _prune(self, node: CachedBlock, now: float) -> None:
        """Remove a node without pages and children from the tree, then likewise its ancestors."""
        while node.parent is not None and not node.children and not any(page in self._nodes for page in node.pages):
            parent = node.parent
            del parent.children[node.key]
            if self._events is not None:
                del self._by_digest[node.digest]
                self._events.evicted(node.digest)
            node = parent
        if node.parent is None:
            if not node.children:
                self._roots.pop(node.key, None)
            return
        for group in self._unbounded:
            self._queue(node, group, now)

    def pages(self) -> list[CachedBlock]:
        """All nodes with pages in reverse order of eviction, parents before children: no node was used later than its
        parent, and the dictionary has parents first."""
        now = self._clock()
        nodes = {id(node): node for node in self._nodes.values()}
        return sorted(nodes.values(), key=lambda node: self._entry(node, 0, now)[:2], reverse=True)

    def _touch(self, node: CachedBlock, warm_until: float, *, is_in_span: bool) -> None:
        node.last_used = self._tick
        if is_in_span:
            node.last_in_span = self._tick
        node.warm_until = max(node.warm_until, warm_until)

    def _when_evictable(self, page: int) -> None:
        node = self._nodes[page]
        self._queue(node, node.pages.index(page), self._clock())

    def _queue(self, node: CachedBlock, group: int, now: float) -> None:
        """Push an entry for an evictable page, if it has none."""
        if group not in node.queued and self._can_go(node, group):
            node.queued.add(group)
            heappush(self._warm if node.warm_until > now else self._cold, (self._entry(node, group, now), node))

    def _pop(self, now: float) -> tuple[CachedBlock, int] | None:
        """Pop the next page to evict, as node and group; None if all pages are locked."""
        while self._cold or self._warm:
            is_warm = self._warm and (not self._cold or self._warm[0][0][0] <= now)
            entry, node = heappop(self._warm if is_warm else self._cold)
            group = entry[3]
            node.queued.discard(group)
            # An entry's key is never later than its page's current one, so the first up-to-date entry is the smallest.
            if self._can_go(node, group) and entry == self._entry(node, group, now):
                return node, group
            self._queue(node, group, now)
        return None

    def _can_go(self, node: CachedBlock, group: int) -> bool:
        page = node.pages[group]
        if self._nodes.get(page) is not node or self._allocator.references(page):
            return False
        return self._spans[group].size is not None or not node.children

    def _entry(self, node: CachedBlock, group: int, now: float) -> _Entry:
        last_used = node.last_used if self._spans[group].size is None else node.last_in_span
        return (node.warm_until if node.warm_until > now else 0.0, last_used, node.pages[group], group, id(node))
