"""Tiers against a plain model of them, through any sequence of puts, fetches, damage and restarts."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.kv_tiers.disk_file import ALIGNMENT
from jaxinfer.kv_tiers.tiers import Tiers
from tests.kv_tiers.made_pages import PAGE_BYTES, disk_size, fetch, key_of, page_of, pages_by_tier, put

NUM_KEYS = 12
MODELS = (b"first", b"second")
NUMBERS = st.integers(0, NUM_KEYS - 1)
PREFIXES = st.lists(NUMBERS, max_size=8, unique=True)


class Settled(RuleBasedStateMachine):
    """The writer and the reader are waited for after every rule: which page is where then follows from the order of calls alone."""

    @initialize(num_host=st.integers(1, 5), num_disk=st.integers(1, 7))
    def start(self, num_host, num_disk):
        self.num_host, self.num_disk = num_host, num_disk
        self.folder = Path(tempfile.mkdtemp())
        self.host: list[int] = []  # least recently used first
        self.disk: list[int] = []
        self.slots: dict[int, tuple[bytes, int, int, bool]] = {}  # slot -> model, page, when it was written, is it whole
        self.num_written = 0
        self.model = MODELS[0]
        self.open()

    def open(self):
        self.tiers = Tiers(PAGE_BYTES, self.num_host * PAGE_BYTES, (str(self.folder / "kv"), disk_size(self.num_disk)), self.model)
        newest = {
            number: (when, slot) for slot, (model, number, when, _) in sorted(self.slots.items(), key=when_written) if model == self.model
        }
        self.host, self.disk = [], sorted(newest, key=newest.__getitem__)
        self.slot_of = {number: slot for number, (_, slot) in newest.items()}
        self.refused = Counter({"other model": sum(model != self.model for model, *_ in self.slots.values())})

    def touch(self, number):
        for tier in (self.host, self.disk):
            if number in tier:
                tier.remove(number)
                tier.append(number)

    def into_host(self, number):
        if number not in self.host:
            self.host = [*self.host[max(0, len(self.host) - self.num_host + 1) :], number]
        self.onto_disk(number)

    def onto_disk(self, number):
        if number not in self.disk:
            free = set(range(self.num_disk)) - set(self.slot_of.values())
            if not free:
                free = {self.slot_of.pop(self.disk.pop(0))}
            self.num_written += 1
            self.slot_of[number] = min(free)
            self.slots[min(free)] = (self.model, number, self.num_written, True)
            self.disk.append(number)

    @rule(number=NUMBERS)
    def put(self, number):
        put(self.tiers, number)
        self.touch(number)
        if number not in self.host:
            self.into_host(number)

    @rule(numbers=PREFIXES)
    def fetch(self, numbers):
        damaged = next((n for n in numbers if n not in self.host and n in self.disk and not self.slots[self.slot_of[n]][-1]), None)
        if damaged is not None:  # what follows it in host memory is saved again, while what came before it takes others' places there
            place = numbers.index(damaged)
            numbers = numbers[: place + 1] + [n for n in numbers[place + 1 :] if place == 0 or n not in self.host]
        present = [n in self.host or n in self.disk for n in numbers]
        numbers_here = numbers[: (*present, False).index(False)]
        assert self.tiers.find([key_of(n) for n in numbers]).num_pages == len(numbers_here)
        for number in reversed(numbers_here):
            self.touch(number)
        good, from_disk = 0, []
        for number in numbers_here:
            if number not in self.host:
                if not self.slots[self.slot_of[number]][-1]:
                    self.disk.remove(number)
                    del self.slot_of[number]
                    self.refused["damaged"] += 1
                    self.drop_from_disk(numbers[numbers.index(number) + 1 :])
                    break
                from_disk.append(number)
            good += 1
        for number in reversed(from_disk[: self.num_host]):
            self.into_host(number)
        assert fetch(self.tiers, *numbers) == good
        assert self.tiers.flush(20)  # pages after a damaged one are written again

    def drop_from_disk(self, numbers):
        """What follows a damaged page, to be computed again; of what host memory has the file gets another copy."""
        for number in set(numbers).intersection(self.disk):
            self.disk.remove(number)
            del self.slot_of[number]
        for number in numbers:
            if number in self.host:
                self.onto_disk(number)

    @rule(number=NUMBERS)
    def touch_one(self, number):
        assert self.tiers.touch(key_of(number)) == (number in self.host or number in self.disk)
        self.touch(number)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def damage(self, data):
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        model, number, when, is_whole = self.slots[slot]
        with open(self.folder / "kv", "r+b") as file:
            file.seek((2 + slot) * ALIGNMENT + PAGE_BYTES - 1)
            file.write(bytes([page_of(key_of(number))[-1] ^ (1 if is_whole else 0)]))  # twice is none
        self.slots[slot] = (model, number, when, not is_whole)

    @rule(model=st.sampled_from(MODELS))
    def restart(self, model):
        self.tiers.close()
        self.model = model
        self.open()

    @rule(num_disk=st.integers(1, 7))
    def restart_with_another_size(self, num_disk):
        self.tiers.close()
        self.num_disk = num_disk
        self.slots = {slot: kept for slot, kept in self.slots.items() if slot < num_disk}
        self.open()

    @invariant()
    def agree(self):
        on_disk_only = sorted(set(self.disk) - set(self.host))
        assert pages_by_tier(self.tiers, range(NUM_KEYS)) == (sorted(self.host), on_disk_only)
        stats = self.tiers.stats()
        assert (stats.host_pages, stats.disk_pages) == (len(self.host), len(self.disk))
        assert Counter(stats.refused) == self.refused
        assert stats.num_dropped == 0
        assert (self.folder / "kv").stat().st_size <= disk_size(self.num_disk)

    def teardown(self):
        if hasattr(self, "tiers"):
            self.tiers.close()
            shutil.rmtree(self.folder)


def when_written(item):
    return item[1][2]


class Running(RuleBasedStateMachine):
    """Nobody waits for anybody: what comes back is right, whatever the threads are at."""

    @initialize(num_host=st.integers(1, 5), num_disk=st.integers(0, 7))
    def start(self, num_host, num_disk):
        self.num_host, self.num_disk = num_host, num_disk
        self.folder = Path(tempfile.mkdtemp())
        self.fetches = []
        self.open()

    def open(self):
        disk = (str(self.folder / "kv"), disk_size(self.num_disk, 8192)) if self.num_disk else None
        self.tiers = Tiers(8192, self.num_host * 8192, disk, b"")

    @rule(numbers=PREFIXES)
    def put(self, numbers):
        self.tiers.put([(key_of(number), page_of(key_of(number), 8192)) for number in numbers])

    @rule(numbers=PREFIXES)
    def fetch(self, numbers):
        self.fetches.append((numbers, self.tiers.fetch([key_of(number) for number in numbers])))

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def cancel(self, data):
        self.fetches[data.draw(st.integers(0, len(self.fetches) - 1))][1].cancel()

    @rule()
    def restart(self):
        self.tiers.close()
        assert all(fetched.done() for _, fetched in self.fetches)
        self.open()

    @rule()
    def check(self):
        for numbers, fetched in self.fetches:
            if not fetched.cancelled():
                expected = [page_of(key_of(number), 8192) for number in numbers]
                pages = fetched.result(20)
                assert np.array_equal(pages, np.array(expected[: len(pages)], np.uint8).reshape(-1, 8192))
        self.fetches = []

    @invariant()
    def stay_within_bounds(self):
        stats = self.tiers.stats()
        assert stats.host_pages <= self.num_host
        assert stats.disk_pages <= self.num_disk
        assert stats.refused == {}
        if self.num_disk:
            assert (self.folder / "kv").stat().st_size <= disk_size(self.num_disk, 8192)

    def teardown(self):
        if hasattr(self, "tiers"):
            self.check()
            assert self.tiers.flush(20)
            stats = self.tiers.stats()
            self.tiers.close()
            assert stats.num_unsaved == 0
            assert not self.tiers._pending
            assert set(self.tiers._host.slots._holds.values()) <= {1}, "nobody holds a slot but its key"
            shutil.rmtree(self.folder)


def test_what_follows_a_damaged_page_is_dropped_and_written_again_where_host_memory_has_it():
    settled = Settled()
    settled.start(num_host=1, num_disk=7)
    for number in range(3):
        settled.put(number)
    with open(settled.folder / "kv", "r+b") as file:
        file.seek(2 * ALIGNMENT)
        file.write(b"\xff")
    model, number, when, _ = settled.slots[0]
    settled.slots[0] = model, number, when, False
    settled.fetch([0, 1, 2])
    settled.agree()
    assert settled.disk == [2]
    settled.teardown()


TestSettled = Settled.TestCase
TestSettled.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRunning = Running.TestCase
TestRunning.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
