"""Slots: which fixed slot of a tier has which page, who uses it, and the order of eviction. Imports no JAX."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable


class Slots:
    """A tier's pages by key, evicted least recently used first. Slots are reference counted: by their key, and by each
    reader or writer. So a page evicted during a read stays intact until the reader releases it.

    Not thread-safe: hold the owner's lock for every call. A held slot's bytes may be accessed without it."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.when_changed: Callable[[bytes], None] = lambda key: None  # called with each key that came or went
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._holds: dict[int, int] = {}
        self._free: list[int] = []  # a heap of slots below _num_touched
        # Slots from here on were never used: a file grows, and memory is taken, no sooner than needed.
        self._num_touched = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def keys(self) -> Iterable[bytes]:
        """All keys, least recently used first."""
        return self._slots.keys()

    def restore(self, slots: Iterable[tuple[bytes, int]]) -> None:
        """Load a file's keys and slots, least recently used first. Only before any slot was used."""
        assert not self._num_touched
        self._slots.update(slots)
        self._holds = dict.fromkeys(self._slots.values(), 1)
        assert len(self._holds) == len(self._slots), "two keys in one slot"
        self._num_touched = max(self._holds, default=-1) + 1
        self._free = [slot for slot in range(self._num_touched) if slot not in self._holds]

    def touch(self, key: bytes) -> bool:
        """Mark a page as just used. False if it isn't here."""
        if key not in self._slots:
            return False
        self._slots.move_to_end(key)
        return True

    def reserve(self, limit: int | None = None) -> int | None:
        """The lowest free slot (below `limit`), with one reference; None if there is none."""
        limit = self.num_slots if limit is None else limit
        if self._free:
            slot = heapq.heappop(self._free) if self._free[0] < limit else None
        elif self._num_touched < limit:
            slot, self._num_touched = self._num_touched, self._num_touched + 1
        else:
            slot = None
        if slot is not None:
            self._holds[slot] = 1
        return slot

    def publish(self, key: bytes, slot: int) -> None:
        """Assign a reserved slot to its key, which takes over the reference. If the key has a slot already, that one
        stays."""
        if key in self._slots:
            self.release(slot)
        else:
            self._slots[key] = slot
            self.when_changed(key)

    def hold(self, key: bytes) -> int | None:
        """A page's slot, with one more reference until `release`; None if the page isn't here."""
        slot = self._slots.get(key)
        if slot is not None:
            self._holds[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Remove a reference; after the last one the slot is free."""
        assert self._holds.get(slot, 0) > 0, f"slot {slot} is free already"
        self._holds[slot] -= 1
        if not self._holds[slot]:
            del self._holds[slot]
            heapq.heappush(self._free, slot)

    def forget(self, key: bytes, slot: int) -> None:
        """Drop a page, if it still is in that slot."""
        if self._slots.get(key) == slot:
            del self._slots[key]
            self.release(slot)
            self.when_changed(key)

    def discard(self, keys: Iterable[bytes]) -> int:
        """Drop pages; returns how many were here. A slot is free once nobody uses it."""
        here = [key for key in keys if key in self._slots]
        for key in here:
            self.release(self._slots.pop(key))
            self.when_changed(key)
        return len(here)

    def evict(self) -> bytes | None:
        """Drop the least recently used page; returns its key, None if there is no page. Its slot is free once nobody
        uses it."""
        if not self._slots:
            return None
        key, slot = self._slots.popitem(last=False)
        self.release(slot)
        self.when_changed(key)
        return key
