"""RadixCache: whose KV is in the pool already, by the tokens from the first on, and which pages go when room is needed. Imports no JAX."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.spec import NULL_PAGE

TOKEN_BYTES = 4


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as the cache compares them: 4 bytes each."""
    return array("i", token_ids).tobytes()


def digests(namespace: str, tokens: bytes, page_size: int, num_pages: int) -> list[bytes]:
    """What `CachedPage.digest` gives for a run's first pages, whether they are in a tree or not."""
    size, digest, found = page_size * TOKEN_BYTES, _namespace_digest(_encoded(namespace)), []
    for start in range(0, num_pages * size, size):
        digest = _page_digest(digest, tokens[start : start + size])
        found.append(digest)
    return found


def _encoded(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")  # it comes from outside: a lone surrogate must stop nobody


def _namespace_digest(namespace: bytes) -> bytes:
    return blake2b(namespace, digest_size=16, person=b"namespace").digest()  # so that no namespace can pose as a run of tokens


def _page_digest(before: bytes, tokens: bytes) -> bytes:
    return blake2b(before + tokens, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class CachedPage:
    """A node of the tree: a page with the tokens it holds, after its parent's. A namespace's root has the null page."""

    tokens: bytes  # of a root the namespace
    page: int
    parent: CachedPage | None
    children: dict[bytes, CachedPage] = field(default_factory=dict)
    last_used: int = 0  # of a logical clock that goes on with every call of match or insert
    warm_until: float = 0.0  # seconds, of the cache's clock
    is_queued: bool = False  # has its one entry in the order of eviction
    known_digest: bytes | None = None

    @property
    def digest(self) -> bytes:
        """16 bytes that name all tokens up to this page's last, and the namespace, the same in every process. Works for evicted pages too."""
        missing, node = [], self
        while node.known_digest is None and node.parent is not None:
            missing.append(node)
            node = node.parent
        digest = node.known_digest = node.known_digest or _namespace_digest(node.tokens)
        for node in reversed(missing):
            digest = node.known_digest = _page_digest(digest, node.tokens)
        return digest


class RadixCache:
    """A tree of whole pages for each namespace. A page is locked while sequences read it, which the allocator's references say.

    Whoever reads a page of the tree reads all the pages before it: sequences take them from the first on, and `insert` replaces what a
    sequence computed twice. So locked pages are closed towards the root, and leaf by leaf every other page can be evicted:
    `allocator.num_evictable` is exactly what `evict` can deliver.

    `match` and `insert` take time in proportion to the pages they are asked for. Every unlocked leaf has one entry in a heap, made when it
    became both, whose key may be older than the leaf's: then it goes back with the right one when it comes up. So `evict` costs
    O(log pages) for each page evicted, and for each that was used since eviction last came across it.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._allocator = allocator
        self._key_size = page_size * TOKEN_BYTES
        self._clock = clock
        self._tick = 0
        self._roots: dict[bytes, CachedPage] = {}
        self._nodes: dict[int, CachedPage] = {}  # by page
        self._cold: list[tuple[float, int, int]] = []  # heaps of what _entry gives
        self._warm: list[tuple[float, int, int]] = []
        # The one place where references end tells: finished, preempted and aborted sequences are alike.
        allocator.when_evictable = lambda page: self._queue(self._nodes[page], self._clock())

    @property
    def num_pages(self) -> int:
        """Pages in the tree, locked ones included."""
        return len(self._nodes)

    def match(self, tokens: bytes, namespace: str, most_pages: int, warm_until: float = 0.0, *, is_used: bool = True) -> list[int]:
        """Pages of the longest known run that `tokens` start with, at most `most_pages`. They are used now (unless `is_used` says no), and
        until `warm_until` evicted after all that are not warm; but not locked: retain them, from the first on, before the next call of
        `evict`."""
        self._tick += 1
        size, pages = self._key_size, []
        node = self._roots.get(_encoded(namespace))
        for start in range(0, min(most_pages * size, len(tokens)), size):
            node = node and node.children.get(tokens[start : start + size])
            if node is None:
                break
            if is_used:
                self._touch(node, warm_until)
            pages.append(node.page)
        return pages

    def insert(self, tokens: bytes, namespace: str, table: list[int], num_pages: int, warm_until: float = 0.0) -> None:
        """Make the first `num_pages` pages of a sequence's page table known as those of `tokens`; they are used as by `match`.

        Where the tree has another page for the same run, the table takes that one, and the sequence's own is given back: so a step that
        is yet to start must see the table as it is afterwards.
        """
        assert num_pages * self._key_size <= len(tokens), f"{num_pages} pages of {len(tokens) // TOKEN_BYTES} tokens"
        self._tick += 1
        size, allocator = self._key_size, self._allocator
        node = self._roots.get(_encoded(namespace))
        for i in range(num_pages):
            if node is None:
                root = _encoded(namespace)
                node = self._roots[root] = CachedPage(root, NULL_PAGE, None)
            key, page = tokens[i * size : (i + 1) * size], table[i]
            child = node.children.get(key)
            if child is None:
                allocator.keep(page)
                child = node.children[key] = self._nodes[page] = CachedPage(key, page, node)
            elif child.page != page:
                # Siblings that started from this page would read those after it and not the tree's before them.
                if allocator.references(page) > 1:
                    return
                allocator.retain([child.page])
                allocator.release([page])
                table[i] = child.page
            self._touch(child, warm_until)
            node = child

    def evict(self, count: int) -> list[CachedPage]:
        """Free that many pages, or as many as there are unlocked, and return what they held: the least recently used leaf first, then its
        parent when that has become one, in turn. Warm ones go after all others, in the order in which their time ends."""
        evicted: list[CachedPage] = []
        now = self._clock()
        while len(evicted) < count and (node := self._pop(now)) is not None:
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens], self._nodes[node.page]
            self._allocator.drop(node.page)
            if parent.parent is not None:
                self._queue(parent, now)
            elif not parent.children:
                del self._roots[parent.tokens]
            evicted.append(node)
        return evicted

    def pages(self) -> list[CachedPage]:
        """All pages, what would be evicted last first, and every page before its children: the tree's books have them in that order, and
        none was used later than its parent."""
        now = self._clock()
        return sorted(self._nodes.values(), key=lambda node: _entry(node, now)[:2], reverse=True)

    def clear(self) -> None:
        """Forget everything. Pages that sequences read stay theirs."""
        for page in self._nodes:
            self._allocator.drop(page)
        for entries in (self._roots, self._nodes, self._cold, self._warm):
            entries.clear()

    def _touch(self, node: CachedPage, warm_until: float) -> None:
        node.last_used = self._tick
        node.warm_until = max(node.warm_until, warm_until)

    def _queue(self, node: CachedPage, now: float) -> None:
        """Give an unlocked leaf its entry, if it has none."""
        if not node.is_queued and self._is_unlocked_leaf(node):
            node.is_queued = True
            heappush(self._warm if node.warm_until > now else self._cold, _entry(node, now))

    def _pop(self, now: float) -> CachedPage | None:
        """The unlocked leaf to go next, out of its heap; None if all pages are locked."""
        while self._cold or self._warm:
            is_warm = self._warm and (not self._cold or self._warm[0][0] <= now)
            entry = heappop(self._warm if is_warm else self._cold)
            node = self._nodes[entry[-1]]
            node.is_queued = False
            # No entry's key is later than its leaf's own, so the first that is not out of date comes before all others.
            if entry == _entry(node, now) and self._is_unlocked_leaf(node):
                return node
            self._queue(node, now)
        return None

    def _is_unlocked_leaf(self, node: CachedPage) -> bool:
        return not node.children and not self._allocator.references(node.page)


def _entry(node: CachedPage, now: float) -> tuple[float, int, int]:
    return (node.warm_until if node.warm_until > now else 0.0, node.last_used, node.page)
