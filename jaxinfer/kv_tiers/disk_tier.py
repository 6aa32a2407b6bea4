"""DiskTier: pages in a file, on a disk that may be full or fail. Imports no JAX."""

from __future__ import annotations

import errno
import logging
from collections import Counter

import numpy as np

from jaxinfer.kv_tiers.disk_file import DiskFile
from jaxinfer.kv_tiers.rate import Rate
from jaxinfer.kv_tiers.slots import Slots

logger = logging.getLogger(__name__)

DISK_GUESS = 3e9  # bytes a second
PATIENCE = 60.0  # seconds until a disk that failed a write, or had no space, is tried again
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTier:
    """Slots in a file. If the disk has no space for the whole file, the slots written so far are reused. After any
    other failed write, none is tried for a while; reading goes on.

    Hold the owner's lock for `reserve`, `publish` and `fail`; not for `write` and `read` of a held slot."""

    def __init__(self, path: str, size: int, page_bytes: int, fingerprint: bytes) -> None:
        self._path = path
        self._file = DiskFile(path, size, page_bytes, fingerprint)
        self.slots = Slots(self._file.num_slots)
        self.slots.restore((page.key, page.slot) for page in self._file.stored)
        self.rate = Rate(DISK_GUESS)
        self.num_hits = 0  # pages read
        self.refused: Counter[str] = self._file.refused
        self.num_failed_writes = 0
        self._checksums = {page.slot: page.checksum for page in self._file.stored}
        self._num_grown = max(self._checksums, default=-1) + 1  # slots within the file's current size
        self._limit_until = self._rest_until = float("-inf")

    def reserve(self, now: float) -> int | None:
        """A slot to write to, if needed the least recently used page's. None while writes are suspended."""
        if now < self._rest_until:
            return None
        limit = self._num_grown if now < self._limit_until else None
        while (slot := self.slots.reserve(limit)) is None:
            if self.slots.evict() is None:
                return None
        return slot

    def write(self, slot: int, key: bytes, page: np.ndarray) -> int:
        """Returns the checksum for `publish`. Raises `OSError`."""
        return self._file.write(slot, key, page)

    def publish(self, key: bytes, slot: int, checksum: int) -> None:
        self._checksums[slot] = checksum
        self._num_grown = max(self._num_grown, slot + 1)
        self.slots.publish(key, slot)

    def fail(self, slot: int, error: OSError, now: float) -> None:
        """A write failed: free the slot, and limit or suspend writes."""
        is_full = error.errno in FULL and slot >= self._num_grown
        if is_full:
            self._limit_until = now + PATIENCE
        else:
            self._rest_until = now + PATIENCE
        self.slots.release(slot)
        self.num_failed_writes += 1
        if self.num_failed_writes == 1:
            outcome = f"it is used up to {self._num_grown} pages" if is_full else f"no page is written for {PATIENCE:.0f} s"
            logger.warning("kv_disk: can't write to %s: %s; %s (reported once)", self._path, error.strerror, outcome)

    def read(self, slot: int, out: np.ndarray) -> str | None:
        """Copy a page to `out`; returns why it must not be used, or None."""
        try:
            return None if self._file.read(slot, self._checksums[slot], out) else "damaged"
        except OSError:
            return "unreadable"

    def close(self) -> None:
        self._file.close()
