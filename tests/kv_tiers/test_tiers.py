"""What falls out of where, what comes back, and that nobody pulls a page from under another's hands."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

from jaxinfer.config import ConfigError
from jaxinfer.kv_tiers.disk_file import DiskFileError
from jaxinfer.kv_tiers.host_tier import HOST_GUESS, HostTier
from jaxinfer.kv_tiers.tiers import TierMatch, Tiers
from tests.kv_tiers.made_pages import MODEL, PAGE_BYTES, disk_size, fetch, key_of, page_of, pages_by_tier, put


@pytest.fixture
def make(tmp_path):
    """Tiers of so many slots; those still open are closed in the end."""
    made = []

    def make_tiers(num_host: int, num_disk: int = 0, fingerprint: bytes = MODEL, page_bytes: int = PAGE_BYTES) -> Tiers:
        disk = (str(tmp_path / "kv"), disk_size(num_disk, page_bytes)) if num_disk else None
        made.append(Tiers(page_bytes, num_host * page_bytes + page_bytes - 1, disk, fingerprint))
        return made[-1]

    yield make_tiers
    for tiers in made:
        tiers.close()


def test_host_memory_drops_the_least_recently_used_page(make):
    tiers = make(3)
    put(tiers, 0, 1, 2)
    assert tiers.touch(key_of(0))
    put(tiers, 3)
    assert pages_by_tier(tiers, range(5)) == ([0, 2, 3], [])
    assert fetch(tiers, 2) == 1
    put(tiers, 4, 5)
    assert pages_by_tier(tiers, range(6)) == ([2, 4, 5], [])
    assert not tiers.touch(key_of(0))
    assert tiers.stats().host_bytes == 3 * PAGE_BYTES


def test_of_a_fetched_prefix_the_end_goes_first(make):
    tiers = make(4)
    put(tiers, 0, 1, 2, 3)
    assert fetch(tiers, 0, 1, 2) == 3
    put(tiers, 4, 5)
    assert pages_by_tier(tiers, range(6)) == ([0, 1, 4, 5], [])


def test_what_host_memory_drops_is_on_disk_and_comes_back_into_host_memory(make):
    tiers = make(2, 5)
    put(tiers, *range(5))
    assert pages_by_tier(tiers, range(5)) == ([3, 4], [0, 1, 2])
    assert fetch(tiers, 0, 1) == 2
    assert pages_by_tier(tiers, range(5)) == ([0, 1], [2, 3, 4])
    stats = tiers.stats()
    assert (stats.num_host_hits, stats.num_disk_hits, stats.num_dropped) == (0, 2, 0)
    assert stats.written_bytes == 5 * PAGE_BYTES, "a page is written once"
    assert (stats.disk_pages, stats.disk_bytes) == (5, 5 * PAGE_BYTES)


def test_of_a_long_fetch_the_beginning_stays_in_host_memory(make):
    tiers = make(2, 6)
    put(tiers, *range(6))
    assert fetch(tiers, 0, 1, 2, 3) == 4
    assert pages_by_tier(tiers, range(6)) == ([0, 1], [2, 3, 4, 5])
    put(tiers, 7)
    assert pages_by_tier(tiers, range(8))[0] == [0, 7]


def test_the_disk_drops_the_least_recently_used_page(make):
    tiers = make(1, 3)
    put(tiers, 0, 1, 2)
    assert fetch(tiers, 0) == 1
    put(tiers, 3)
    assert pages_by_tier(tiers, range(4)) == ([3], [0, 2])


def test_a_restart_finds_the_pages_and_goes_on_with_the_oldest(make):
    first = make(2, 4)
    put(first, 0, 1, 2, 3, 4)
    first.close()
    second = make(2, 4)
    assert pages_by_tier(second, range(5)) == ([], [1, 2, 3, 4])
    assert fetch(second, 3, 4) == 2
    put(second, 5)
    assert pages_by_tier(second, range(6)) == ([3, 5], [2, 4])
    assert second.stats().refused == {}


def test_close_writes_what_is_unsaved(make):
    first = make(8, 8)
    first.put((key_of(n), page_of(key_of(n))) for n in range(8))
    first.close()
    first.close()
    assert make(8, 8).find([key_of(n) for n in range(8)]).num_pages == 8


def test_pages_of_another_model_are_not_found(make):
    first = make(2, 4)
    put(first, 0, 1, 2, 3)
    first.close()
    second = make(2, 4, fingerprint=b"other weights")
    assert pages_by_tier(second, range(4)) == ([], [])
    assert second.stats().refused == {"other model": 4}
    put(second, 1)
    assert fetch(second, 1) == 1


def test_find_counts_leading_pages_and_changes_nothing(make):
    tiers = make(2, 3)
    put(tiers, 0, 1, 2)
    keys = [key_of(n) for n in (0, 2, 1, 9, 0)]
    for _ in range(2):
        found = tiers.find(keys)
        assert (found.num_pages, found.host_bytes, found.disk_bytes) == (3, 2 * PAGE_BYTES, PAGE_BYTES)
    assert tiers.find(keys[3:]) == TierMatch(0, 0, 0, 0.0, 0.0) == tiers.find([])
    put(tiers, 3)
    assert pages_by_tier(tiers, range(4)) == ([2, 3], [1]), "0 was looked for, not used"


def test_a_key_that_is_here_keeps_its_bytes(make):
    tiers = make(2)
    put(tiers, 0)
    tiers.put([(key_of(0), np.zeros(PAGE_BYTES, np.uint8))])
    assert fetch(tiers, 0) == 1


def test_a_page_may_have_any_shape_and_strides_and_is_copied(make):
    tiers = make(2)
    pool = np.random.default_rng(0).integers(0, 256, (3, 2, 5, 16), np.uint8)  # pages along the third axis
    expected = np.ascontiguousarray(pool[:, :, 4]).tobytes()
    tiers.put([(b"k", pool[:, :, 4])])
    pool[:] = 0
    pages = tiers.fetch([b"k"]).result(20)
    assert pages.shape == (1, PAGE_BYTES)
    assert pages.tobytes() == expected
    with pytest.raises(ValueError, match="read-only"):
        pages[0, 0] = 1


def test_a_page_of_another_size_is_a_mistake(make):
    with pytest.raises(ValueError, match="reshape"):
        make(2).put([(b"k", np.zeros(PAGE_BYTES - 1, np.uint8))])


def test_sizes_that_hold_no_page_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"kv_host_memory of 95 B holds no page of 96 B: give more"):
        Tiers(96, 95)
    with pytest.raises(ConfigError, match=r"kv_host_memory of .* is more than this machine gives: give less"):
        Tiers(96, 2**62)
    with pytest.raises(DiskFileError, match=r"kv_disk of 5 B holds no page"):
        Tiers(96, 96, (str(tmp_path / "kv"), 5))


class Gate:
    """Holds whoever calls the wrapped function until it is opened."""

    def __init__(self, function) -> None:
        self.function, self.reached, self.opened = function, threading.Event(), threading.Event()

    def __call__(self, *arguments):
        self.reached.set()
        assert self.opened.wait(20)
        return self.function(*arguments)


def test_a_page_under_the_reader_is_not_overwritten(make, monkeypatch):
    tiers = make(3)
    put(tiers, 0, 1, 2)
    gate = Gate(tiers._host.read)
    monkeypatch.setattr(tiers._host, "read", gate)
    fetched = tiers.fetch([key_of(0)])
    assert gate.reached.wait(20)
    put(tiers, 3, 4, 5, 6, 7)
    assert pages_by_tier(tiers, range(8)) == ([6, 7], []), "one slot is the reader's"
    assert not fetched.done()
    gate.opened.set()
    assert fetched.result(20)[0].tobytes() == page_of(key_of(0)).tobytes()
    put(tiers, 8)
    assert pages_by_tier(tiers, range(9)) == ([6, 7, 8], [])


def test_a_page_under_the_reader_on_disk_is_not_overwritten(make, monkeypatch):
    tiers = make(1, 2)
    put(tiers, 0, 1)
    gate = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", gate)
    fetched = tiers.fetch([key_of(0)])
    assert gate.reached.wait(20)
    put(tiers, 2, 3, 4)
    assert pages_by_tier(tiers, range(5)) == ([4], [])
    gate.opened.set()
    assert fetched.result(20)[0].tobytes() == page_of(key_of(0)).tobytes()
    assert tiers.stats().refused == {}


def test_the_engine_never_waits_for_the_disk(make, monkeypatch):
    """A write that hangs: pages go on being kept, found and fetched; those that fall out unwritten are lost and counted."""
    tiers = make(3, 8)
    put(tiers, 0)
    gate = Gate(os.pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    tiers.put((key_of(n), page_of(key_of(n))) for n in (1, 2))
    assert gate.reached.wait(20)
    tiers.put((key_of(n), page_of(key_of(n))) for n in range(3, 8))
    assert pages_by_tier(tiers, range(8)) == ([6, 7], [0]), "one slot is the writer's"
    assert fetch(tiers, 6, 7) == 2
    assert not tiers.flush(0.01)
    stats = tiers.stats()
    assert (stats.num_dropped, stats.num_unsaved) == (4, 3)
    gate.opened.set()
    assert tiers.flush(20)
    assert pages_by_tier(tiers, range(8))[1] == [0, 1]
    assert tiers.find([key_of(0), key_of(1), key_of(6), key_of(7)]).num_pages == 4
    assert tiers.stats().num_dropped == 4


def test_no_slot_is_free_when_all_are_in_use(make, monkeypatch):
    tiers = make(1)
    put(tiers, 0)
    gate = Gate(tiers._host.read)
    monkeypatch.setattr(tiers._host, "read", gate)
    fetched = tiers.fetch([key_of(0)])
    assert gate.reached.wait(20)
    put(tiers, 1)
    assert tiers.find([key_of(1)]).num_pages == 0
    assert tiers.stats().num_dropped == 1
    gate.opened.set()
    assert len(fetched.result(20)) == 1
    put(tiers, 1)
    assert fetch(tiers, 1) == 1


def test_a_page_that_comes_back_while_it_is_written_is_written_once(make, monkeypatch):
    tiers = make(2, 4)
    gate = Gate(os.pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    pages = [(key_of(n), page_of(key_of(n))) for n in (0, 1, 0)]
    tiers.put(pages[:1])
    assert gate.reached.wait(20)
    tiers.put(pages[1:2])
    tiers._host.slots.evict()
    tiers.put(pages[2:])
    gate.opened.set()
    assert tiers.flush(20)
    assert tiers.stats().written_bytes == tiers.stats().disk_bytes == len(tiers._disk.slots) * PAGE_BYTES
    assert fetch(tiers, 0) == 1


def test_fetches_wait_for_those_before_them(make, monkeypatch):
    tiers = make(4)
    put(tiers, 0, 1, 2)
    gate = Gate(tiers._host.read)
    monkeypatch.setattr(tiers._host, "read", gate)
    first = tiers.fetch([key_of(0), key_of(1)])
    assert gate.reached.wait(20)
    found = tiers.find([key_of(2)])
    assert found.seconds > 0
    assert found.wait_seconds == pytest.approx(2 * found.seconds, rel=0.5)
    second, third = tiers.fetch([key_of(2)]), tiers.fetch([key_of(2)])
    assert third.cancel()
    gate.opened.set()
    assert (len(first.result(20)), len(second.result(20))) == (2, 1)
    assert fetch(tiers, 0) == 1
    assert tiers.find([key_of(2)]).wait_seconds == 0
    with pytest.raises(CancelledError):
        third.result()


def test_fetches_that_have_not_begun_are_given_up_by_close(make, monkeypatch):
    tiers = make(4)
    put(tiers, 0)
    gate = Gate(tiers._host.read)
    monkeypatch.setattr(tiers._host, "read", gate)
    first, second = tiers.fetch([key_of(0)]), tiers.fetch([key_of(0)])
    assert gate.reached.wait(20)
    closing = threading.Thread(target=tiers.close)
    closing.start()
    gate.opened.set()
    closing.join(20)
    assert not closing.is_alive()
    assert len(first.result(20)) == 1
    assert second.done()


def test_estimates_follow_what_is_measured(make, monkeypatch):
    tiers = make(2, 4, page_bytes=1 << 20)
    put(tiers, 0, 1, 2)
    keys = [key_of(n) for n in (0, 1, 2)]
    before = tiers.find(keys)
    assert before.host_bytes == 2 << 20
    assert before.disk_bytes == 1 << 20
    clock = iter(range(10**6))
    monkeypatch.setattr("jaxinfer.kv_tiers.tiers.time.monotonic", lambda: next(clock))  # each reading takes a second
    assert fetch(tiers, 1) == fetch(tiers, 0) == 1
    after = tiers.stats()
    assert 1e6 < after.host_bytes_per_second < 4e6 < HOST_GUESS
    assert 1e6 < after.disk_bytes_per_second < 4e6
    assert tiers.find([key_of(0)]).seconds > 0.3


def test_a_mistake_while_reading_reaches_whoever_asked(make, monkeypatch):
    tiers = make(2)
    put(tiers, 0)
    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "read", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiers.fetch([key_of(0)]).result(20)
    assert fetch(tiers, 0) == 1
