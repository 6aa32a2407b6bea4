"""DeviceClock: how long a mesh worked at each step, as the host can tell. Imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeviceClock:
    """A mesh runs what it is given in order, so a step starts when it was launched or when the one before it ended, whichever is later.
    Steps must be told in the order of their launches, as soon as their results are there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._free_at = 0.0

    def ended(self, launched_at: float) -> float:
        """A step has ended now; returns the seconds that it took."""
        now = self.now()
        seconds = now - max(launched_at, self._free_at)
        self._free_at = now
        return seconds
