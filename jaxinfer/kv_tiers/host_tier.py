"""HostTier: pages in host memory. Imports no JAX."""

from __future__ import annotations

import numpy as np

from jaxinfer.config import ConfigError, format_bytes
from jaxinfer.kv_tiers.rate import Rate
from jaxinfer.kv_tiers.slots import Slots

HOST_GUESS = 20e9  # bytes a second


class HostTier:
    """Slots in one array of at most `size` bytes, 0 for none; the system allocates memory as slots are first
    written."""

    def __init__(self, size: int, page_bytes: int) -> None:
        num_slots = size // page_bytes
        if size and not num_slots:
            raise ConfigError(f"kv_host_memory of {format_bytes(size)} holds no page of {format_bytes(page_bytes)}: give more")
        try:
            self._pages = np.empty((num_slots, page_bytes), np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: too large for an array
            raise ConfigError(f"kv_host_memory of {format_bytes(size)} is more than this machine gives: give less") from error
        self.slots = Slots(num_slots)
        self.rate = Rate(HOST_GUESS)
        self.num_hits = 0  # pages read

    def page(self, slot: int) -> np.ndarray:
        """The slot's own memory, uint8[page_bytes]."""
        return self._pages[slot]

    def write(self, slot: int, page: np.ndarray) -> None:
        np.copyto(self._pages[slot].reshape(page.shape), page)

    def read(self, slot: int, out: np.ndarray) -> str | None:
        """Copy a page to `out`. Returns None: pages in host memory are never refused."""
        np.copyto(out, self._pages[slot])
        return None
