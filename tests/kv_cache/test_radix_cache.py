"""The prefix cache: by example, and step by step against a plain dictionary of everything it should know."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.kv_cache import radix_cache
from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.block_keys import digests
from jaxinfer.kv_cache.events import CacheEvents
from jaxinfer.kv_cache.radix_cache import CachedBlock, RadixCache

PAGE_SIZE = 2


class Pool:
    """A small pool with its cache, and a clock that a test moves."""

    def __init__(self, num_pages: int = 12) -> None:
        self.now = 1000.0
        self.allocator = PageAllocator(num_pages + 1)
        self.events = CacheEvents(most_kept=12)
        self.cache = RadixCache(self.allocator, PAGE_SIZE, clock=lambda: self.now, events=self.events)

    def compute(self, text: str, namespace: str = "", warm_until: float = 0.0) -> list[int]:
        """A sequence that computes all its pages, makes them known and goes on; its page table. A letter is a token."""
        table = self.allocator.allocate(-(-len(text) // PAGE_SIZE))
        assert table is not None
        self.cache.insert(keys(text), namespace, table, len(text) // PAGE_SIZE, warm_until)
        return table

    def serve(self, *texts: str, namespace: str = "", warm_until: float = 0.0) -> list[int]:
        """Sequences one after the other, the last one's page table, which it has given back."""
        for text in texts:
            table = self.compute(text, namespace, warm_until)
            self.allocator.release(table)
        return table

    def match(self, text: str, namespace: str = "", max_pages: int = 99, warm_until: float = 0.0) -> list[int]:
        return self.cache.match(keys(text)[:max_pages], namespace, warm_until)

    def evict(self, count: int) -> list[str]:
        """The letters that each evicted page held."""
        return [text_of(node) for node in self.cache.evict(count)]


def keys(text: str, size: int = PAGE_SIZE) -> list[bytes]:
    """Of its whole blocks."""
    return [text[start : start + size].encode("utf-32-le") for start in range(0, len(text) - size + 1, size)]


def text_of(node: CachedBlock) -> str:
    return node.key.decode("utf-32-le")


def test_the_longest_known_run_of_whole_pages_is_found():
    pool = Pool()
    table = pool.serve("abcdefg")
    assert pool.match("abcdefg") == table[:3], "the fourth page is not full"
    assert pool.match("abcdxyz") == table[:2]
    assert pool.match("abcdexy") == table[:2]
    assert pool.match("abc") == table[:1]
    assert pool.match("a") == pool.match("") == pool.match("bcde") == []
    assert pool.match("abcdefgh", max_pages=2) == table[:2]


def test_runs_that_begin_alike_share_pages_and_part_where_they_differ():
    pool = Pool()
    first, second = pool.serve("aabbcc"), pool.serve("aabbdd")
    assert second[:2] == first[:2]
    assert pool.cache.num_pages == 4
    assert pool.match("aabbdd") == second


def test_the_same_page_after_other_tokens_is_another_page():
    pool = Pool()
    pool.serve("aabb", "ccbb")
    assert pool.match("aabb")[1] != pool.match("ccbb")[1]


def test_namespaces_do_not_see_each_other():
    pool = Pool()
    ours, theirs = pool.compute("aabb", "ours"), pool.compute("aabb", "theirs")
    assert pool.match("aabb", "ours") == ours
    assert pool.match("aabb", "theirs") == theirs != ours
    assert pool.match("aabb") == []
    assert pool.match("aabb", "\ud800") == [], "no name stops the engine"


def test_a_sequence_that_computed_a_known_run_takes_the_known_pages():
    pool = Pool()
    first = pool.compute("aabbc")
    second = pool.allocator.allocate(3)
    own = list(second)
    pool.cache.insert(keys("aabbd"), "", second, 2)
    assert second == [*first[:2], own[2]]
    assert [pool.allocator.references(page) for page in (*second, *own[:2])] == [2, 2, 1, 0, 0]


def test_pages_that_siblings_start_from_are_not_exchanged_under_them():
    pool = Pool()
    pool.serve("aa")
    table = pool.allocator.allocate(2)
    sibling = list(table)
    pool.allocator.retain(sibling)
    pool.cache.insert(keys("aabb"), "", table, 2)
    assert table == sibling, "else the sibling would lock the second page and not the first before it"
    assert pool.cache.num_pages == 1
    pool.allocator.release(sibling)
    pool.cache.insert(keys("aabb"), "", table, 2)
    assert pool.match("aabb") == table != sibling


def test_the_least_recently_used_leaf_goes_first_and_its_parent_after_it():
    pool = Pool()
    pool.serve("aabb", "aacc", "dd")
    pool.match("aabb")
    assert pool.evict(2) == ["cc", "dd"]
    assert pool.evict(9) == ["bb", "aa"]
    assert pool.allocator.num_free == 12
    assert pool.evict(1) == []


def test_what_a_sequence_reads_stays():
    pool = Pool()
    table = pool.compute("aabb")
    pool.serve("aabbcc", "dd")
    assert pool.allocator.num_evictable == 2
    assert pool.evict(9) == ["cc", "dd"]
    pool.allocator.release(table)
    pool.allocator.retain(table)
    assert pool.evict(9) == [], "whether or not it was matched"
    pool.allocator.release(table)
    assert pool.evict(9) == ["bb", "aa"]


def test_a_page_matched_and_given_up_again_can_be_evicted():
    """An aborted sequence says nothing to the cache: its references end, that is all."""
    pool = Pool()
    pool.serve("aa", "bb")
    matched = pool.match("aa")
    pool.allocator.retain(matched)
    assert pool.evict(9) == ["bb"], "and the entry of the locked page is dropped"
    pool.allocator.release(matched)
    assert pool.evict(9) == ["aa"]


def test_a_sessions_pages_go_last_until_their_time_ends():
    pool = Pool()
    pool.serve("aa", warm_until=pool.now + 20)
    pool.serve("bb", warm_until=pool.now + 10)
    pool.serve("cc", "dd")
    assert pool.evict(1) == ["cc"]
    assert pool.evict(2) == ["dd", "bb"], "the one that has less time left"
    pool.serve("ee")
    pool.now += 19
    assert pool.evict(1) == ["ee"]
    pool.serve("ff")
    pool.now += 1
    assert pool.evict(2) == ["aa", "ff"], "cold, and the older"


def test_a_stranger_does_not_cool_a_sessions_pages_and_the_session_warms_a_strangers():
    pool = Pool()
    pool.serve("aa", warm_until=pool.now + 10)
    pool.serve("bb")
    pool.match("aa")
    pool.match("bb", warm_until=pool.now + 20)
    pool.match("bb", warm_until=pool.now + 5)
    pool.serve("cc", "dd", "ee")
    assert pool.evict(2) == ["cc", "dd"]
    pool.now += 10
    assert pool.evict(2) == ["aa", "ee"], "bb is warm for longer"


def test_namespaces_that_hold_nothing_are_forgotten():
    pool = Pool()
    for number in range(100):
        pool.serve("aa", namespace=str(number))
        pool.match("aa", namespace="never seen")
        pool.evict(1)
    assert not pool.cache._roots


def test_evicted_pages_say_what_they_held():
    pool = Pool()
    pool.serve("aabbcc", namespace="ours")
    evicted = pool.cache.evict(3)
    assert [node.digest for node in reversed(evicted)] == digests("ours", keys("aabbcc"))
    assert len({node.page for node in evicted}) == 3


def test_digests_tell_runs_namespaces_and_page_sizes_apart():
    runs = [("", "aabbcc", 2), ("", "xxbbcc", 2), ("ours", "aabbcc", 2), ("", "aabbcc", 3), ("", "aabbcc", 6)]
    found = [digest for namespace, text, size in runs for digest in digests(namespace, keys(text, size))]
    assert len(set(found)) == len(found) == 3 + 3 + 3 + 2 + 1
    assert all(len(digest) == 16 for digest in found)
    assert digests("", keys("aabb")) == found[:2]


def test_no_namespace_poses_as_a_run_of_another():
    for number in itertools.count():
        with contextlib.suppress(UnicodeDecodeError):
            posing = (digests(str(number), keys("aa"))[0] + keys("bb")[0]).decode()
            break
    assert digests(posing, keys("cc"))[0] != digests(str(number), keys("aabbcc"))[2]


def test_a_very_long_run_has_a_digest():
    pool = Pool(20_000)
    pool.serve("ab" * 20_000)
    assert pool.cache.evict(1)[0].digest == digests("", keys("ab" * 20_000))[-1]


@pytest.mark.parametrize("num_locked", [0, 200])
def test_eviction_looks_at_a_locked_leaf_once(monkeypatch, num_locked):
    pool, num_popped = Pool(500), itertools.count()
    texts = [chr(i) * 2 for i in range(1000, 1500)]
    pool.serve(*texts)
    locked = [pool.match(text) for text in texts[:num_locked]]
    for pages in locked:
        pool.allocator.retain(pages)

    def counted(heap):
        next(num_popped)
        return pop(heap)

    pop = radix_cache.heappop
    monkeypatch.setattr(radix_cache, "heappop", counted)
    for text in texts[num_locked : num_locked + 100]:
        assert pool.evict(1) == [text]
    assert next(num_popped) == num_locked + 100


@dataclass
class Running:
    """A sequence of the machine below."""

    text: str
    namespace: str
    warm_for: float
    table: list[int]


@dataclass
class Known:
    page: int
    last_used: int = 0
    warm_until: float = 0.0


TEXTS = st.text(alphabet="ab", min_size=1, max_size=9)
NAMESPACES = st.sampled_from(["", "", "ours"])
WARM_FOR = st.sampled_from([0.0, 0.0, 5.0, 20.0])
ANY = st.integers(min_value=0, max_value=99)


class RadixCacheAgainstModel(RuleBasedStateMachine):
    """Sequences start, decode, fork, finish and are aborted; the model finds every answer by looking at all it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.known: dict[tuple[str, str], Known] = {}  # by namespace and the whole run of letters
        self.running: list[Running] = []
        self.num_uses = 0
        self.told: set[bytes] = set()  # digests, by events
        self.last_event: int | None = None

    # What the model says.

    def runs(self, text: str, namespace: str, num_pages: int) -> list[tuple[str, str]]:
        return [(namespace, text[: (i + 1) * PAGE_SIZE]) for i in range(num_pages)]

    def readers(self) -> Counter[int]:
        return Counter(page for sequence in self.running for page in sequence.table)

    def use(self, known: Known, warm_until: float) -> None:
        known.last_used, known.warm_until = self.num_uses, max(known.warm_until, warm_until)

    def expect_match(self, text: str, namespace: str, max_pages: int, warm_until: float) -> list[int]:
        self.num_uses += 1
        runs = self.runs(text, namespace, min(max_pages, len(text) // PAGE_SIZE))
        found = [self.known[run] for run in itertools.takewhile(self.known.__contains__, runs)]
        for known in found:
            self.use(known, warm_until)
        return [known.page for known in found]

    def expect_insert(self, sequence: Running, warm_until: float) -> list[int]:
        self.num_uses += 1
        table, readers = list(sequence.table), self.readers()
        for i, run in enumerate(self.runs(sequence.text, sequence.namespace, len(sequence.text) // PAGE_SIZE)):
            known = self.known.setdefault(run, Known(table[i]))
            if known.page != table[i] and readers[table[i]] > 1:
                break
            table[i] = known.page
            self.use(known, warm_until)
        return table

    def expect_evicted(self, count: int) -> list[tuple[str, str]]:
        readers, evicted = self.readers(), []
        while len(evicted) < count:
            inner = {(namespace, run[:-PAGE_SIZE]) for namespace, run in self.known}
            leaves = [run for run, known in self.known.items() if run not in inner and not readers[known.page]]
            if not leaves:
                break
            cold = [run for run in leaves if self.known[run].warm_until <= self.pool.now]
            evicted.append(
                min(cold, key=lambda run: self.known[run].last_used)
                if cold
                else min(leaves, key=lambda run: (self.known[run].warm_until, self.known[run].last_used))
            )
            del self.known[evicted[-1]]
        return evicted

    # What a manager does.

    def match(self, text: str, namespace: str, max_pages: int, warm_for: float) -> list[int]:
        warm_until = warm_for and self.pool.now + warm_for
        found = self.pool.match(text, namespace, max_pages, warm_until)
        assert found == self.expect_match(text, namespace, max_pages, warm_until)
        return found

    def insert(self, sequence: Running) -> None:
        warm_until = sequence.warm_for and self.pool.now + sequence.warm_for
        expected = self.expect_insert(sequence, warm_until)
        num_pages = len(sequence.text) // PAGE_SIZE
        self.pool.cache.insert(keys(sequence.text), sequence.namespace, sequence.table, num_pages, warm_until)
        assert sequence.table == expected

    def evict_pages(self, count: int) -> int:
        expected = self.expect_evicted(count)
        evicted = self.pool.cache.evict(count)
        assert [(text_of(node), node.digest) for node in evicted] == [
            (run[-PAGE_SIZE:], digests(namespace, keys(run))[-1]) for namespace, run in expected
        ]
        return len(evicted)

    def take_pages(self, table: list[int], num_tokens: int) -> bool:
        allocator = self.pool.allocator
        missing = -(-num_tokens // PAGE_SIZE) - len(table)
        if missing > allocator.num_free + allocator.num_evictable:
            return False
        if missing > allocator.num_free:
            self.evict_pages(missing - allocator.num_free)
        pages = allocator.allocate(missing)
        assert pages is not None, "what is evictable can be evicted"
        table += pages
        return True

    def stop(self, which: int) -> None:
        self.pool.allocator.release(self.running.pop(which % len(self.running)).table)

    # What happens.

    @rule(text=TEXTS, namespace=NAMESPACES, warm_for=WARM_FOR)
    def start(self, text: str, namespace: str, warm_for: float) -> None:
        table = self.match(text, namespace, (len(text) - 1) // PAGE_SIZE, warm_for)
        self.pool.allocator.retain(table)
        self.running.append(Running(text, namespace, warm_for, table))
        if not self.take_pages(table, len(text)):
            self.stop(-1)

    @rule(text=TEXTS, namespace=NAMESPACES, max_pages=st.integers(0, 5), warm_for=WARM_FOR)
    def look_without_starting(self, text: str, namespace: str, max_pages: int, warm_for: float) -> None:
        self.match(text, namespace, max_pages, warm_for)

    @precondition(lambda self: self.running)
    @rule(which=ANY, letter=st.sampled_from("ab"))
    def decode(self, which: int, letter: str) -> None:
        sequence = self.running[which % len(self.running)]
        if self.take_pages(sequence.table, len(sequence.text) + 1):
            sequence.text += letter

    @precondition(lambda self: self.running)
    @rule(which=ANY)
    def make_known(self, which: int) -> None:
        self.insert(self.running[which % len(self.running)])

    @precondition(lambda self: self.running)
    @rule(which=ANY)
    def finish(self, which: int) -> None:
        self.make_known(which)
        self.stop(which)

    @precondition(lambda self: self.running)
    @rule(which=ANY)
    def abort(self, which: int) -> None:
        self.stop(which)

    @precondition(lambda self: self.running)
    @rule(which=ANY, warm_for=WARM_FOR)
    def fork(self, which: int, warm_for: float) -> None:
        first = self.running[which % len(self.running)]
        table = first.table[: (len(first.text) - 1) // PAGE_SIZE]
        self.pool.allocator.retain(table)
        self.running.append(Running(first.text, first.namespace, warm_for, table))
        if not self.take_pages(table, len(first.text)):
            self.stop(-1)

    @precondition(lambda self: self.running)
    @rule(which=ANY)
    def preempt_and_resume(self, which: int) -> None:
        sequence = self.running[which % len(self.running)]
        self.finish(which)
        self.start(sequence.text, sequence.namespace, sequence.warm_for)

    @rule(seconds=st.sampled_from([1.0, 5.0, 17.0]))
    def pass_time(self, seconds: float) -> None:
        self.pool.now += seconds

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        self.evict_pages(count)

    @rule()
    def read_events(self) -> None:
        """Of a reader that comes now and then, at times too late."""
        change = self.pool.events.since(self.last_event)
        if change is not None:
            assert change.is_reset or change.first == (self.last_event or 0) + 1
            self.last_event = change.last
            self.told = (set() if change.is_reset else self.told - set(change.evicted)) | set(change.inserted)
        assert self.told == {digests(namespace, keys(run))[-1] for namespace, run in self.known}

    # What always holds.

    @invariant()
    def every_page_has_just_the_readers_that_it_should(self) -> None:
        allocator, readers = self.pool.allocator, self.readers()
        assert {page: allocator.references(page) for page in range(1, 13) if allocator.references(page)} == readers
        cached = {page for page in range(1, 13) if allocator.is_cached(page)}
        assert cached == {known.page for known in self.known.values()}
        assert allocator.num_used == len(readers)
        assert allocator.num_evictable == len(cached - set(readers))
        assert allocator.num_free == 12 - len(cached | set(readers))

    @invariant()
    def the_tree_holds_what_the_model_knows(self) -> None:
        found, readers = {}, self.readers()
        for root in self.pool.cache._roots.values():
            assert root.children, "no root without pages"
            below = [(root, root.key.decode(), "", 1)]
            while below:
                node, namespace, run, num_readers = below.pop()
                if run:
                    found[namespace, run] = node.page
                    assert num_readers or not readers[node.page], "who reads a page reads all before it"
                    num_readers = readers[node.page]
                below += [(child, namespace, run + text_of(child), num_readers) for child in node.children.values()]
        assert found == {run: known.page for run, known in self.known.items()}
        assert self.pool.cache.num_pages == len(found)

    @invariant()
    def all_that_is_evictable_can_be_evicted_and_no_more(self) -> None:
        cache = copy.deepcopy(self.pool.cache, {id(self.pool.events): None})
        num_evictable = cache._allocator.num_evictable
        assert len(cache.evict(99)) == num_evictable
        assert cache._allocator.num_evictable == 0


TestRadixCacheAgainstModel = RadixCacheAgainstModel.TestCase
TestRadixCacheAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
