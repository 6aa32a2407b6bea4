"""What goes down when the prefix cache evicts it, what comes up for whom, and who waits for it how long."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_tiers.tiers import Tiers
from jaxinfer.kv_transfer import tiers as module
from jaxinfer.kv_transfer.tiers import TierTransfer
from jaxinfer.request import DEFAULT_CONTEXT, RequestContext
from jaxinfer.segments import Segment
from jaxinfer.sequence import Sequence
from tests import sequences
from tests.kv_tiers.made_pages import disk_size
from tests.kv_transfer.fake_mover import FakeMover
from tests.sequences import History, Picture, text

PAGE_SIZE, NUM_PAGES = 4, 12
PAGE_BYTES = PAGE_SIZE * 8
FOREVER = lambda num_tokens: float("inf")  # noqa: E731


class Mesh:
    """A pool whose pages hold their tokens, and the prompts that were computed on it."""

    def __init__(self, num_pages: int = NUM_PAGES) -> None:
        self.pool = np.zeros((num_pages + 1, PAGE_SIZE), np.int64)
        self.manager = KVManager(PageSpec(1, 1, 1, PAGE_SIZE, 8), num_pages + 1)
        self.mover = FakeMover(self.pool)

    def compute(self, tokens: list[int], context: RequestContext = DEFAULT_CONTEXT, segments: Iterable[Segment] = ()) -> None:
        """Serve a prompt and leave its pages in the cache."""
        table, history = list[int](), History(tokens, context, segments)
        self.manager.match_prefix(table, history, len(tokens))
        assert self.manager.grow(table, len(tokens))
        for place, token in enumerate(tokens):
            self.pool[table[place // PAGE_SIZE], place % PAGE_SIZE] = token
        self.manager.insert(table, history, len(tokens))
        self.manager.free(table)

    def evict(self, num_pages: int | None = None) -> None:
        """Let so many pages fall out of the cache, four or more, or all of them."""
        if num_pages is None:
            self.manager.forget()
            return
        table: list[int] = []
        free = self.manager.num_pages - self.manager.num_cached
        assert self.manager.grow(table, (free + num_pages) * PAGE_SIZE)
        self.manager.free(table)

    def num_cached(self, tokens: list[int]) -> int:
        """How many leading pages of a prompt are in the cache."""
        return self.manager.missing(History(tokens), len(tokens))[0]


class Rig:
    """Meshes over tiers of host memory and, with a path, of a disk."""

    def __init__(self, meshes: list[Mesh], num_host: int, disk: str | None, num_disk: int, seconds: Callable[[int], float], most: int):
        self.tiers = Tiers(PAGE_BYTES, num_host * PAGE_BYTES, (disk, disk_size(num_disk, PAGE_BYTES)) if disk else None, b"model")
        self.meshes, self.mesh = meshes, meshes[0]
        self.transfer = TierTransfer(self.tiers, [(mesh.mover, mesh.manager) for mesh in meshes], seconds, most)  # type: ignore[misc]

    def saved(self) -> None:
        """Wait until what has been evicted so far is in host memory, and on disk if there is one."""
        assert self.transfer._flush(time.monotonic() + 20)
        assert self.transfer.poll(0.0) == self.transfer._ended()

    def ended(self, *expected: Sequence) -> None:
        """Wait until just these sequences' fetches have ended."""
        deadline = time.monotonic() + 20
        while len(ended := self.transfer.poll(0.01)) < len(expected):
            assert time.monotonic() < deadline
        assert set(ended) == set(expected)

    def admit(self, sequence: Sequence) -> int:
        """Give a sequence its page table as the scheduler does; returns how many of its pages came from the tiers,
        each of which is right."""
        table, before = sequence.prefill.pages, self.mesh.mover.num_scattered
        num_cached = self.mesh.manager.match_prefix(table, sequence, len(sequence.token_ids) - 1)
        assert self.mesh.manager.grow(table, len(sequence.token_ids))
        num_filled = self.transfer.fill(sequence, table, num_cached)
        held = self.mesh.pool[table].reshape(-1)[:num_filled].tolist()
        assert held == sequence.token_ids[:num_filled]
        assert num_filled < len(sequence.token_ids), "the last is computed, to sample from"
        self.mesh.manager.insert(table, sequence, num_filled)
        assert (num_filled - num_cached) // PAGE_SIZE == self.mesh.mover.num_scattered - before
        return self.mesh.mover.num_scattered - before

    def gone_down(self, tokens: list[int]) -> None:
        """Compute a prompt and let its pages fall out of the cache."""
        self.mesh.compute(tokens)
        self.mesh.evict()
        self.saved()


MakeRig = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make_rig(
        num_meshes: int = 1, num_host: int = 64, disk: str | None = None, num_disk: int = 32, seconds=FOREVER, most_fetched: int = 64
    ) -> Rig:
        made.append(Rig([Mesh() for _ in range(num_meshes)], num_host, disk, num_disk, seconds, most_fetched))
        return made[-1]

    yield make_rig
    for rig in made:
        rig.transfer.close()


def prompt(length: int, start: int = 0, context: RequestContext = DEFAULT_CONTEXT, **params: Any) -> Sequence:
    """A waiting sequence with the tokens `start`, `start` + 1, ..."""
    sequence = sequences.make(length, context=context, **params)
    sequence.token_ids = list(range(start, start + length))
    return sequence


def on_disk_only(make: MakeRig, folder: Path, length: int, seconds: Callable[[int], float] = FOREVER) -> Rig:
    """A rig that finds the pages of a prompt in the file of an earlier one."""
    first = make(disk=str(folder / "kv"))
    first.gone_down(list(range(length)))
    first.transfer.close()
    return make(disk=str(folder / "kv"), seconds=seconds)


class Gate:
    """Holds whoever calls the wrapped function until it is opened."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.reached, self.opened = function, threading.Event(), threading.Event()

    def __call__(self, *arguments: object) -> Any:
        self.reached.set()
        assert self.opened.wait(20)
        return self.function(*arguments)


@pytest.fixture
def hold_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rig], Gate]:
    def hold(rig: Rig) -> Gate:
        gate = Gate(rig.tiers._host.read)
        monkeypatch.setattr(rig.tiers._host, "read", gate)
        return gate

    return hold


def test_what_was_evicted_comes_back_into_a_page_table(make):
    rig, sequence = make(), prompt(30)
    rig.gone_down(sequence.token_ids)
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    assert rig.admit(sequence) == 7
    assert rig.transfer.num_tokens_restored == 28
    assert rig.transfer.poll(0.0) == []


def test_the_page_of_the_last_token_is_not_fetched(make):
    rig, sequence = make(), prompt(8)
    rig.gone_down(sequence.token_ids)
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    assert rig.admit(sequence) == 1


def test_only_what_the_mesh_lacks_is_fetched(make):
    rig, sequence = make(), prompt(30)
    rig.gone_down(sequence.token_ids)
    rig.mesh.compute(sequence.token_ids[:12])
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    assert rig.tiers.stats().num_host_hits == 4
    assert rig.admit(sequence) == 4


def test_nothing_is_begun_for_what_devices_have_or_nobody_has_or_must_be_computed(make):
    rig = make(num_meshes=2)
    rig.gone_down(list(range(30)))
    rig.mesh.compute(list(range(100, 130)))
    rig.meshes[1].compute(list(range(30)))
    assert not rig.transfer.begin(prompt(30, 100))
    assert not rig.transfer.begin(prompt(30)), "it comes from the decode mesh"
    assert not rig.transfer.begin(prompt(30, 500))
    assert not rig.transfer.begin(prompt(4))
    rig.meshes[1].manager.forget()
    assert not rig.transfer.begin(prompt(30, prompt_logprobs=1))
    assert not rig.transfer.begin(prompt(30, context=RequestContext(namespace="other")))
    assert rig.transfer.begin(prompt(30))


def test_what_is_quicker_to_compute_is_not_fetched(make, monkeypatch):
    asked = []
    seconds = {28: 0.5}
    rig = make(seconds=lambda num_tokens: asked.append(num_tokens) or seconds[num_tokens])
    rig.gone_down(list(range(30)))
    monkeypatch.setattr(rig.tiers._host.rate, "seconds_for", lambda num_bytes, now: num_bytes / PAGE_BYTES * 0.1)  # 0.7 s
    assert not rig.transfer.begin(prompt(30))
    seconds[28] = 0.8
    assert rig.transfer.begin(prompt(30))
    assert not rig.transfer.begin(prompt(29, 500))
    assert asked == [28, 28]


def test_the_way_onto_the_mesh_counts_too(make):
    rig = make(seconds=lambda num_tokens: 1.0)
    rig.gone_down(list(range(30)))
    rig.transfer._seconds_to_move = 0.2
    assert not rig.transfer.begin(prompt(30))
    rig.transfer._seconds_to_move = 0.1
    assert rig.transfer.begin(prompt(30))


def test_fetches_before_it_count_too(make, monkeypatch, hold_reads):
    rig = make(seconds=lambda num_tokens: 1.0)
    for start in (0, 100):
        rig.gone_down(list(range(start, start + 30)))
    monkeypatch.setattr(rig.tiers._host.rate, "seconds_for", lambda num_bytes, now: num_bytes / PAGE_BYTES * 0.1)
    gate = hold_reads(rig)
    first, second = prompt(30), prompt(30, 100)
    assert rig.transfer.begin(first)
    assert rig.transfer.poll(0.0) == []
    assert gate.reached.wait(20)
    assert not rig.transfer.begin(second), "0.7 s for the first and 0.7 s for itself"
    gate.opened.set()
    rig.ended(first)
    assert rig.transfer.begin(second)


def test_two_sequences_that_lack_the_same_pages_share_one_fetch(make, hold_reads):
    rig, first, second, other = make(), prompt(30), prompt(31), prompt(20)
    rig.gone_down(first.token_ids)
    gate = hold_reads(rig)
    assert all(rig.transfer.begin(s) for s in (first, second, other))
    assert rig.transfer.poll(0.0) == []
    assert gate.reached.wait(20)
    rig.transfer.forget(first)
    gate.opened.set()
    rig.ended(second, other)
    assert rig.tiers.stats().num_host_hits == 7 + 4
    assert rig.admit(second) == 7
    assert rig.admit(other) == 0, "the first filled what it lacked"


def test_who_goes_away_takes_nothing_from_those_that_share_its_fetch(make, hold_reads):
    rig = make()
    for start in (0, 100):
        rig.gone_down(list(range(start, start + 30)))
    gate, before, first, second = hold_reads(rig), prompt(30), prompt(30, 100), prompt(30, 100)
    assert all(rig.transfer.begin(s) for s in (before, first, second))
    assert rig.transfer.poll(0.0) == []
    assert gate.reached.wait(20)
    rig.transfer.forget(first)
    gate.opened.set()
    rig.ended(before, second)
    assert rig.admit(second) == 7


def test_a_fetch_that_nobody_needs_any_more_is_cancelled(make, hold_reads):
    rig = make()
    for start in (0, 100):
        rig.gone_down(list(range(start, start + 30)))
    gate, first, second, third = hold_reads(rig), prompt(30), prompt(30, 100), prompt(30, 100)
    assert all(rig.transfer.begin(s) for s in (first, second, third))
    assert rig.transfer.poll(0.0) == []
    assert gate.reached.wait(20)
    rig.transfer.forget(second)
    rig.transfer.forget(third)
    gate.opened.set()
    rig.ended(first)
    assert rig.tiers.fetch([]).result(20).shape == (0, PAGE_BYTES)
    assert rig.tiers.stats().num_host_hits == 7


def test_of_a_damaged_prefix_the_pages_before_the_damage_come_back(make, tmp_path):
    rig, sequence = on_disk_only(make, tmp_path, 30), prompt(30)
    keys = rig.mesh.manager.missing(sequence, 28)[1]
    slot = rig.tiers._disk.slots.hold(keys[3])
    with open(tmp_path / "kv", "r+b") as file:
        file.seek((2 + slot) * 4096 + 5)
        file.write(b"\xff")
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    assert rig.admit(sequence) == 3
    assert rig.tiers.stats().refused == {"damaged": 1}


@pytest.mark.parametrize("most_fetched", [10, 3])
def test_one_request_repairs_a_prefix_whatever_number_of_its_pages_is_damaged(make, tmp_path, most_fetched):
    on_disk_only(make, tmp_path, 30).transfer.close()
    with open(tmp_path / "kv", "r+b") as file:
        for slot in range(7):
            file.seek((2 + slot) * 4096 + 5)
            file.write(b"\xff")
    rig, first, second = make(disk=str(tmp_path / "kv"), most_fetched=most_fetched), prompt(30), prompt(30)
    assert rig.transfer.begin(first)
    rig.ended(first)
    assert rig.admit(first) == 0
    rig.mesh.manager.free(first.prefill.pages)
    rig.gone_down(first.token_ids)
    rig.transfer.close()
    again = make(disk=str(tmp_path / "kv"))
    assert again.transfer.begin(second)
    again.ended(second)
    assert again.admit(second) == 7


def test_pages_that_the_mesh_got_meanwhile_are_not_written_again(make):
    rig, sequence = make(), prompt(30)
    rig.gone_down(sequence.token_ids)
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    rig.mesh.compute(sequence.token_ids[:16])
    assert rig.admit(sequence) == 3


def test_pages_that_went_down_meanwhile_are_fetched_too_when_the_turn_comes(make):
    rig, sequence = make(), prompt(30)
    rig.gone_down(sequence.token_ids)
    rig.mesh.compute(sequence.token_ids[:16])
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    assert not rig.transfer.begin_again(sequence), "what was fetched fits to what the mesh has"
    rig.mesh.evict()
    assert rig.transfer.begin_again(sequence)
    rig.ended(sequence)
    assert rig.admit(sequence) == 7


def test_whose_pages_go_down_again_and_again_computes_them(make):
    rig, sequence = make(), prompt(30)
    rig.gone_down(sequence.token_ids)
    for num_kept, is_begun in ((24, True), (16, True), (8, False)):
        rig.mesh.compute(sequence.token_ids[:num_kept])
        begin = rig.transfer.begin if num_kept == 24 else rig.transfer.begin_again
        assert begin(sequence) == is_begun
        rig.ended(sequence)
        rig.mesh.evict()
    assert rig.admit(sequence) == 0


def test_a_gap_between_the_mesh_and_what_was_fetched_leaves_it_unused(make):
    rig, sequence = make(), prompt(30)
    rig.gone_down(sequence.token_ids)
    rig.mesh.compute(sequence.token_ids[:16])
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    rig.mesh.evict()
    assert rig.admit(sequence) == 0


def test_pages_of_a_preempted_sequence_that_went_down_come_back(make):
    """When it was preempted the mesh still had them."""
    rig, sequence = make(), prompt(30)
    rig.mesh.compute(sequence.token_ids)
    assert not rig.transfer.begin(sequence)
    rig.mesh.evict()
    rig.saved()
    assert rig.transfer.begin_again(sequence)
    rig.ended(sequence)
    assert rig.admit(sequence) == 7


def test_fetched_pages_take_no_more_room_than_there_is(make):
    rig = make(most_fetched=10)
    waiting = [prompt(30, start) for start in (0, 100, 200)]
    for sequence in waiting:
        rig.gone_down(sequence.token_ids)
    assert all(rig.transfer.begin(sequence) for sequence in waiting)
    for sequence in waiting:
        rig.ended(sequence)  # alone: there is room for one
        assert rig.admit(sequence) == 7
        rig.mesh.manager.free(sequence.prefill.pages)
    long = prompt(45, 300)
    rig.gone_down(long.token_ids)
    assert rig.transfer.begin(long)
    rig.ended(long)
    assert rig.admit(long) == 10, "as much as there is room for"


def test_urgent_work_takes_the_room_of_what_was_fetched_for_others(make):
    rig = make(most_fetched=10)
    idle, urgent = prompt(30, context=RequestContext(priority=20)), prompt(30, 100)
    for sequence in (idle, urgent):
        rig.gone_down(sequence.token_ids)
    assert rig.transfer.begin(idle)
    rig.ended(idle)
    assert rig.transfer.begin(urgent)
    assert rig.transfer.poll(0.0) == [idle]
    rig.ended(urgent)
    assert rig.transfer.begin_again(idle), "it asks again when its turn comes"
    assert rig.transfer.poll(0.0) == [urgent]
    assert rig.admit(urgent) == 7
    rig.mesh.manager.free(urgent.prefill.pages)
    rig.ended(idle)
    assert rig.admit(idle) == 7


def test_nobody_waits_for_a_disk_that_hangs(make, tmp_path, monkeypatch):
    rig, sequence, next_one = on_disk_only(make, tmp_path, 30, lambda num_tokens: 0.001 * num_tokens), prompt(30), prompt(30)
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    gate = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", gate)
    assert rig.transfer.begin(sequence)
    assert rig.transfer.poll(0.0) == []
    assert gate.reached.wait(20)
    now += 0.09
    assert rig.transfer.poll(0.0) == [], "a tenth of a second is allowed"
    now += 0.02
    assert rig.transfer.poll(0.0) == [sequence]
    assert rig.admit(sequence) == 0
    rig.mesh.manager.free(sequence.prefill.pages)
    assert not rig.transfer.begin(next_one), "nothing more is asked of it"
    gate.opened.set()
    deadline = time.time() + 20
    while not rig.transfer.begin(next_one):
        assert time.time() < deadline


def test_waiting_for_room_ends_too(make, monkeypatch):
    rig, first, second = make(most_fetched=8, seconds=lambda num_tokens: 1.0), prompt(30), prompt(30, 100)
    for sequence in (first, second):
        rig.gone_down(sequence.token_ids)
    assert rig.transfer.begin(first)
    rig.ended(first)
    assert rig.transfer.begin(second)
    assert rig.transfer.poll(0.0) == [first]
    now = time.monotonic() + 1.1
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    assert set(rig.transfer.poll(0.0)) == {first, second}
    assert not rig.transfer.begin_again(second), "it has waited long enough"
    assert rig.admit(first) == 7
    rig.mesh.manager.free(first.prefill.pages)
    assert rig.admit(second) == 0


def test_pages_that_can_not_be_read_are_computed(make, monkeypatch, caplog):
    rig, sequence = make(), prompt(30)
    rig.gone_down(sequence.token_ids)
    monkeypatch.setattr(rig.tiers._host, "read", lambda *arguments: 1 / 0)
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    with caplog.at_level(logging.WARNING):
        assert rig.admit(sequence) == 0
    assert "ZeroDivisionError" in caplog.text


def test_a_page_that_is_below_already_is_not_copied_again(make):
    rig = make()
    rig.gone_down(list(range(24)))
    assert rig.mesh.mover.num_gathered == 6
    rig.gone_down([*range(24), *range(100, 108)])
    assert rig.mesh.mover.num_gathered == 8
    assert rig.tiers.stats().host_pages == 8


def test_pages_of_either_mesh_go_down(make):
    rig, sequence = make(num_meshes=2), prompt(30)
    rig.meshes[1].compute(sequence.token_ids)
    rig.meshes[1].evict()
    rig.saved()
    assert rig.transfer.begin(sequence)
    rig.ended(sequence)
    assert rig.admit(sequence) == 7


def test_a_device_waits_for_its_copies_when_too_many_are_under_way_and_loses_none(make, monkeypatch):
    monkeypatch.setattr(module, "_MOST_SAVED", 8)
    rig = make()
    gate = Gate(rig.tiers.put)
    monkeypatch.setattr(rig.tiers, "put", gate)
    rig.mesh.compute(list(range(48)))
    evicting = threading.Thread(target=lambda: [rig.mesh.evict(4) for _ in range(3)])
    evicting.start()
    assert gate.reached.wait(20)
    evicting.join(0.1)
    assert evicting.is_alive()
    assert rig.mesh.mover.num_gathered <= 8
    gate.opened.set()
    evicting.join(20)
    rig.saved()
    assert rig.tiers.stats().host_pages == 12


def test_a_mistake_in_saving_is_not_lost(make, monkeypatch):
    rig = make()
    monkeypatch.setattr(rig.tiers, "put", lambda pages: 1 / 0)
    rig.mesh.compute(list(range(8)))
    rig.mesh.evict()
    with pytest.raises(ZeroDivisionError):
        for _ in range(2000):
            rig.transfer.poll(time.sleep(0.01) or 0.0)


def test_close_saves_what_both_meshes_keep_for_the_next_run(make, tmp_path):
    first = make(num_meshes=2, disk=str(tmp_path / "kv"))
    first.meshes[0].compute(list(range(30)))
    first.meshes[1].compute(list(range(100, 130)))
    first.transfer.close()
    second = make(disk=str(tmp_path / "kv"))
    for sequence in (prompt(30), prompt(30, 100)):
        assert second.transfer.begin(sequence)
        second.ended(sequence)
        assert second.admit(sequence) == 7
        second.mesh.manager.free(sequence.prefill.pages)


def test_of_more_than_the_file_holds_what_was_used_last_is_saved_from_its_beginning_on(make, tmp_path):
    first = make(disk=str(tmp_path / "kv"), num_disk=5)
    first.mesh.compute(list(range(100, 124)))
    first.mesh.compute(list(range(16)))
    first.transfer.close()
    second = make(disk=str(tmp_path / "kv"), num_disk=5)
    assert second.tiers.find(second.mesh.manager.missing(History(list(range(16))), 16)[1]).num_pages == 4
    assert second.tiers.find(second.mesh.manager.missing(History(list(range(100, 124))), 24)[1]).num_pages == 1


def test_without_a_file_close_copies_nothing(make):
    rig = make()
    rig.mesh.compute(list(range(30)))
    rig.transfer.close()
    assert rig.mesh.mover.num_gathered == 0


def test_close_takes_no_longer_than_it_may(make, tmp_path, monkeypatch):
    rig = make(disk=str(tmp_path / "kv"))
    rig.mesh.compute(list(range(30)))
    gate = Gate(os.pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    threading.Timer(0.5, gate.opened.set).start()  # a write that has begun is waited for
    started = time.monotonic()
    rig.transfer.close(0.05)
    assert time.monotonic() - started < 10


def test_the_same_placeholders_come_up_only_with_the_same_picture(make: MakeRig):
    rig = make()
    ids = [*range(6), *[Picture.ID] * 5, *range(13)]
    cat, dog = ((text(range(6)), Picture(5, name), text(range(13))) for name in (b"cat", b"dog"))
    rig.mesh.compute(ids, segments=cat)
    rig.mesh.evict()
    rig.saved()
    for segments, num_found in ((cat, 6), (dog, 1), ([text(ids)], 1)):
        keys = rig.mesh.manager.missing(History(ids, segments=segments), len(ids))[1]
        assert rig.tiers.find(keys).num_pages == num_found
