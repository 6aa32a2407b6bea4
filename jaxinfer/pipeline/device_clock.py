"""DeviceClock: how long a mesh worked on each step, as the host can tell. Imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeviceClock:
    """A mesh runs its steps in order, so a step starts at its launch or at the end of the step before, whichever is
    later. Call `ended` in the order of launches, as soon as a step's result is ready."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._free_at = 0.0

    def ended(self, launched_at: float) -> float:
        """Call when a step has ended; returns the seconds that it took. `launched_at`: seconds, of `now`."""
        now = self.now()
        seconds = now - max(launched_at, self._free_at)
        self._free_at = now
        return seconds
