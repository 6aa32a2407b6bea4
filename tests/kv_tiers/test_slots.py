from __future__ import annotations

import pytest

from jaxinfer.kv_tiers.slots import Slots


def full(num_slots: int) -> Slots:
    slots = Slots(num_slots)
    for number in range(num_slots):
        slots.publish(b"%d" % number, slots.reserve())
    return slots


def test_slots_come_lowest_first_and_no_more_than_there_are():
    slots = Slots(3)
    assert [slots.reserve() for _ in range(4)] == [0, 1, 2, None]
    slots.release(1)
    slots.release(0)
    assert slots.reserve(limit=0) is None
    assert [slots.reserve(), slots.reserve(limit=1), slots.reserve(limit=2)] == [0, None, 1]


def test_the_least_recently_used_page_goes_first():
    slots = full(4)
    assert slots.touch(b"0")
    assert slots.touch(b"2")
    assert not slots.touch(b"9")
    assert [slots.evict() for _ in range(5)] == [b"1", b"3", b"0", b"2", None]
    assert len(slots) == 0


def test_a_held_slot_is_given_to_nobody_until_it_is_let_go():
    slots = full(2)
    held = slots.hold(b"0")
    assert slots.hold(b"0") == held == 0
    assert slots.evict() == b"0"
    assert b"0" not in slots
    assert slots.hold(b"0") is None
    assert slots.reserve() is None
    slots.release(held)
    assert slots.reserve() is None
    slots.release(held)
    assert slots.reserve() == 0


def test_the_first_page_of_a_key_stays():
    slots = Slots(2)
    first, second = slots.reserve(), slots.reserve()
    slots.publish(b"k", first)
    slots.publish(b"k", second)
    assert slots.hold(b"k") == first
    assert slots.reserve() == second


def test_a_page_is_forgotten_only_in_the_slot_that_is_meant():
    slots = full(2)
    slots.forget(b"0", 1)
    assert b"0" in slots
    slots.forget(b"0", 0)
    assert b"0" not in slots
    slots.forget(b"0", 0)
    assert slots.reserve() == 0


def test_what_a_file_holds_is_taken_over_with_its_gaps():
    slots = Slots(6)
    slots.restore([(b"old", 4), (b"new", 1)])
    assert list(slots.keys()) == [b"old", b"new"]
    assert [slots.reserve() for _ in range(5)] == [0, 2, 3, 5, None]
    assert slots.evict() == b"old"
    assert slots.reserve() == 4


def test_a_free_slot_can_not_be_released():
    with pytest.raises(AssertionError, match="slot 0 is free already"):
        Slots(1).release(0)
