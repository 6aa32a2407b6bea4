"""Rate: how fast a tier gives pages back, as measured lately. Imports no JAX."""

from __future__ import annotations

HALF_LIFE = 60.0  # seconds
GUESS_BYTES = 1 << 20  # what the first guess weighs


class Rate:
    """Bytes a second. Begins as a guess, better too high than too low: what is never chosen is never measured. Measurements fade back
    to it with a half-life, so that a tier that was slow once is tried again."""

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self._bytes = self._seconds = 0.0
        self._measured_at = 0.0

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """That many bytes took that long, just now. `now` is in seconds of any clock that only goes forward."""
        fading = self._fading(now)
        self._bytes = self._bytes * fading + num_bytes
        self._seconds = self._seconds * fading + seconds
        self._measured_at = now

    def seconds_for(self, num_bytes: int, now: float) -> float:
        """How long that many bytes would take."""
        fading = self._fading(now)
        return num_bytes * (GUESS_BYTES / self._guess + self._seconds * fading) / (GUESS_BYTES + self._bytes * fading)

    def bytes_per_second(self, now: float) -> float:
        return 1 / self.seconds_for(1, now)

    def _fading(self, now: float) -> float:
        return 0.5 ** ((now - self._measured_at) / HALF_LIFE)
