"""Rate: bytes a second that a tier reads, as measured recently. Imports no JAX."""

from __future__ import annotations

HALF_LIFE = 60.0  # seconds
GUESS_BYTES = 1 << 20  # weight of the initial guess


class Rate:
    """Bytes a second. Starts as a guess, which should be high: a tier that is never chosen is never measured.
    Measurements decay towards the guess with a half-life, so that a tier that was slow once is tried again."""

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self._bytes = self._seconds = 0.0
        self._measured_at = 0.0

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """Record a transfer that ended at `now`, in seconds of any monotonic clock."""
        fading = self._fading(now)
        self._bytes = self._bytes * fading + num_bytes
        self._seconds = self._seconds * fading + seconds
        self._measured_at = now

    def seconds_for(self, num_bytes: int, now: float) -> float:
        """Expected seconds for this many bytes."""
        fading = self._fading(now)
        return num_bytes * (GUESS_BYTES / self._guess + self._seconds * fading) / (GUESS_BYTES + self._bytes * fading)

    def bytes_per_second(self, now: float) -> float:
        return 1 / self.seconds_for(1, now)

    def _fading(self, now: float) -> float:
        return 0.5 ** ((now - self._measured_at) / HALF_LIFE)
