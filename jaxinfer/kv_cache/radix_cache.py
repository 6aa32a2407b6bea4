"""RadixCache: whose KV is in the pool already, by the tokens from the first on, and which pages go when room is needed. Imports no JAX."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.spec import NULL_PAGE
from pallas_kernels.span import FULL_ATTENTION, Span

TOKEN_BYTES = 4


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as the cache compares them: 4 bytes each."""
    return array("i", token_ids).tobytes()


def digests(namespace: str, tokens: bytes, page_size: int, num_pages: int) -> list[bytes]:
    """What `CachedBlock.digest` gives for a run's first pages, whether they are in a tree or not."""
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
class CachedBlock:
    """A node of the tree: a run of tokens after its parent's, and the pages that hold them, one for each group of layers. NULL_PAGE: that
    of a bounded group, evicted or never computed. A namespace's root has the null page."""

    tokens: bytes  # of a root the namespace
    pages: list[int]
    parent: CachedBlock | None
    children: dict[bytes, CachedBlock] = field(default_factory=dict)
    last_used: int = 0  # of a logical clock that goes on with every call of match or insert
    last_in_span: int = 0  # the same, of a use in which bounded groups' pages were needed
    warm_until: float = 0.0  # seconds, of the cache's clock
    queued: set[int] = field(default_factory=set)  # groups whose pages have their one entry in the order of eviction
    known_digest: bytes | None = None

    @property
    def page(self) -> int:
        """Of a model of one group, its page."""
        return self.pages[0]

    @property
    def digest(self) -> bytes:
        """16 bytes that name all tokens up to this run's last, and the namespace, the same in every process. Works for evicted ones too."""
        missing, node = [], self
        while node.known_digest is None and node.parent is not None:
            missing.append(node)
            node = node.parent
        digest = node.known_digest = node.known_digest or _namespace_digest(node.tokens)
        for node in reversed(missing):
            digest = node.known_digest = _page_digest(digest, node.tokens)
        return digest


_Entry = tuple[float, int, int, int, int]  # warm until, last used, page, of which group, of which node


class RadixCache:
    """A tree of whole runs for each namespace. A page is locked while sequences read it, which the allocator's references say. Page tables
    are flat: each run's pages, one a group, run by run.

    Whoever reads an unbounded group's page of the tree reads all the pages before it: sequences take them from the first on, and `insert`
    replaces what a sequence computed twice. So locked pages are closed towards the root, and leaf by leaf every other page can be evicted.
    A bounded group's page (of a window, a chunk) is needed by what follows closely alone: it can be evicted wherever it is unlocked, and a
    match ends where all that its span reaches back to is there. Thus `allocator.num_evictable` is exactly what `evict` can deliver.

    `match` and `insert` take time in proportion to the runs they are asked for. Every page that can be evicted has one entry in a heap, made
    when it became so, whose key may be older than its own: then it goes back with the right one when it comes up. So `evict` costs
    O(log pages) for each page evicted, and for each that was used since eviction last came across it.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
        spans: Sequence[Span] = (FULL_ATTENTION,),
    ) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._key_size = page_size * TOKEN_BYTES
        self._clock = clock
        self._spans = tuple(spans)
        self._num_groups = len(self._spans)
        self._bounded = [group for group, span in enumerate(self._spans) if span.size is not None]
        self._unbounded = [group for group, span in enumerate(self._spans) if span.size is None]
        self._tick = 0
        self._roots: dict[bytes, CachedBlock] = {}
        self._nodes: dict[int, CachedBlock] = {}  # by page
        self._cold: list[tuple[_Entry, CachedBlock]] = []  # heaps of what _entry gives
        self._warm: list[tuple[_Entry, CachedBlock]] = []
        # The one place where references end tells: finished, preempted and aborted sequences are alike.
        allocator.when_evictable = self._when_evictable

    @property
    def num_pages(self) -> int:
        """Pages in the tree, locked ones included."""
        return len(self._nodes)

    def match(self, tokens: bytes, namespace: str, max_blocks: int, warm_until: float = 0.0, *, is_used: bool = True) -> list[int]:
        """The page table of the longest known prefix of `tokens`, at most `max_blocks`, from which their next token can be computed: without
        the pages of bounded groups that it does not reach back to. They are used now (unless `is_used` says no), and until `warm_until`
        evicted after all that are not warm; but not locked: retain them, from the first on, before the next call of `evict`."""
        self._tick += 1
        size, path = self._key_size, list[CachedBlock]()
        node = self._roots.get(_encoded(namespace))
        for start in range(0, min(max_blocks * size, len(tokens)), size):
            node = node and node.children.get(tokens[start : start + size])
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

    def _num_usable(self, path: list[CachedBlock]) -> int:
        """How many runs of a path a sequence can start after."""
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
        tokens: bytes,
        namespace: str,
        table: list[int],
        num_runs: int,
        warm_until: float = 0.0,
        after: tuple[int, CachedBlock] | None = None,
    ) -> CachedBlock | None:
        """Make the first `num_runs` runs of a sequence's page table known as those of `tokens`; they are used as by `match`. Returns the last
        one's node, if it got that far. `after`: how many runs an earlier call made known, and what it returned; `tokens` are those after them.

        Where the tree has another page of an unbounded group for the same run, the table takes that one, and the sequence's own is given
        back: so a step that is yet to start must see the table as it is afterwards.
        """
        first, node = after or (0, self._roots.get(_encoded(namespace)))
        assert (num_runs - first) * self._key_size <= len(tokens), f"{num_runs - first} runs of {len(tokens) // TOKEN_BYTES} tokens"
        self._tick += 1
        size, num_groups = self._key_size, self._num_groups
        for i in range(first, num_runs):
            if node is None:
                root = _encoded(namespace)
                node = self._roots[root] = CachedBlock(root, [NULL_PAGE], None)
            key, at = tokens[(i - first) * size : (i - first + 1) * size], i * num_groups
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = CachedBlock(key, [NULL_PAGE] * num_groups, node)
            elif self._is_shared_copy(child, table, at):
                return None
            self._take_up(child, table, at)
            self._touch(child, warm_until, is_in_span=any(table[at + group] != NULL_PAGE for group in self._bounded))
            node = child
        if node is not None:  # it has no page where all groups are bounded and have left it behind
            self._prune(node, self._clock())
        return node

    def has(self, node: CachedBlock) -> bool:
        """Whether a node is in the tree still: then all before it are."""
        return node.parent is None or node.parent.children.get(node.tokens) is node

    def _is_shared_copy(self, node: CachedBlock, table: list[int], at: int) -> bool:
        """Whether siblings started from a table's own page of this run: they would read those after it, and not the tree's before them."""
        return any(
            node.pages[group] not in (table[at + group], NULL_PAGE) and self._allocator.references(table[at + group]) > 1
            for group in self._unbounded
        )

    def _take_up(self, node: CachedBlock, table: list[int], at: int) -> None:
        """Give a node the pages that it has not, and an unbounded group's place in the table the page that the node has."""
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
        """Free that many pages (a few more, where a leaf has several), or as many as there are unlocked, and return the nodes whose pages
        they were: the least recently used leaf first, then its parent when that has become one, in turn, and pages of bounded groups by
        when they were last in a span. Warm ones go after all others, in the order in which their time ends."""
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
        """Take a node that has no pages and no children out of the tree, and those above it that are then so, too."""
        while node.parent is not None and not node.children and not any(page in self._nodes for page in node.pages):
            parent = node.parent
            del parent.children[node.tokens]
            node = parent
        if node.parent is None:
            if not node.children:
                self._roots.pop(node.tokens, None)
            return
        for group in self._unbounded:
            self._queue(node, group, now)

    def pages(self) -> list[CachedBlock]:
        """All nodes with pages, what would be evicted last first, and every one before its children: the tree's books have them in that
        order, and none was used later than its parent."""
        now = self._clock()
        nodes = {id(node): node for node in self._nodes.values()}
        return sorted(nodes.values(), key=lambda node: self._entry(node, 0, now)[:2], reverse=True)

    def clear(self) -> None:
        """Forget everything. Pages that sequences read stay theirs."""
        for page in self._nodes:
            self._allocator.drop(page)
        for entries in (self._roots, self._nodes, self._cold, self._warm):
            entries.clear()

    def _touch(self, node: CachedBlock, warm_until: float, *, is_in_span: bool) -> None:
        node.last_used = self._tick
        if is_in_span:
            node.last_in_span = self._tick
        node.warm_until = max(node.warm_until, warm_until)

    def _when_evictable(self, page: int) -> None:
        node = self._nodes[page]
        self._queue(node, node.pages.index(page), self._clock())

    def _queue(self, node: CachedBlock, group: int, now: float) -> None:
        """Give a page that can be evicted its entry, if it has none."""
        if group not in node.queued and self._can_go(node, group):
            node.queued.add(group)
            heappush(self._warm if node.warm_until > now else self._cold, (self._entry(node, group, now), node))

    def _pop(self, now: float) -> tuple[CachedBlock, int] | None:
        """The page to go next, as its node and group, out of its heap; None if all pages are locked."""
        while self._cold or self._warm:
            is_warm = self._warm and (not self._cold or self._warm[0][0][0] <= now)
            entry, node = heappop(self._warm if is_warm else self._cold)
            group = entry[3]
            node.queued.discard(group)
            # No entry's key is later than its page's own, so the first that is not out of date comes before all others.
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
