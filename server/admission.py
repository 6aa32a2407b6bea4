"""The rate at which waiting requests are admitted, from which Retry-After is computed."""

from __future__ import annotations

import math

HALF_LIFE = 30.0  # seconds of waiting after which an admission counts half


class AdmissionRate:
    """Counts requests that wait for their first token, and those that got it, over the time in which any waited. Idle
    time says nothing about the rate and is not counted. `now` is in seconds, time.monotonic()."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self._num_admitted = 0.0  # and the seconds that they took: both decay, so that the rate is a recent one
        self._seconds = 0.0
        self._now = 0.0

    def wait(self, now: float) -> None:
        """A request has begun to wait."""
        self._pass_time(now)
        self._num_waiting += 1

    def admit(self, now: float) -> None:
        """A waiting request was admitted."""
        self.leave(now)
        self._num_admitted += 1

    def leave(self, now: float) -> None:
        """A waiting request has left."""
        self._pass_time(now)
        self._num_waiting -= 1

    def seconds_until_admitted(self, now: float) -> float:
        """How long those waiting now will take at the recent rate. Before the first admission the rate is unknown; then
        as long as they have waited so far."""
        self._pass_time(now)
        return self._seconds * (self._num_waiting / self._num_admitted if self._num_admitted else 1.0)

    def _pass_time(self, now: float) -> None:
        if self._num_waiting:
            kept = 0.5 ** ((now - self._now) / HALF_LIFE)
            self._num_admitted *= kept
            # the integral of the same decay
            self._seconds = self._seconds * kept + (1 - kept) * HALF_LIFE / math.log(2)
        self._now = now
