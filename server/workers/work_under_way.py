"""WorkUnderWay: what a worker was given and has still to do, and how fast it does it. Imports no JAX."""

from __future__ import annotations

from jaxinfer.request import OutputDelta

_REMEMBERED_SECONDS = 10.0  # of device time: what came before weighs half as much as as many since


class WorkUnderWay:
    """Sums over calls. Belongs to one event loop."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of prompts, to compute before their first tokens
        self.num_sequences = 0  # that it decodes, or will
        self._computed = self._seconds = 0.0  # tokens, and the device time they took

    @property
    def tokens_per_second(self) -> float:
        """Of prefill, measured; 0 before the first prompt."""
        return self._computed / self._seconds if self._seconds else 0.0

    def begin(self, num_tokens: int, num_sequences: int = 0) -> CallWork:
        """Count a call until its `end`. `num_tokens`: to compute, as far as is known."""
        return CallWork(self, num_tokens, num_sequences)

    def measure(self, num_tokens: int, seconds: float) -> None:
        """So many tokens were computed in so much device time."""
        kept = 0.5 ** (seconds / _REMEMBERED_SECONDS)
        self._computed = self._computed * kept + num_tokens
        self._seconds = self._seconds * kept + seconds


class CallWork:
    """One call's."""

    def __init__(self, of: WorkUnderWay, num_tokens: int, num_sequences: int) -> None:
        self._of, self._num_tokens, self._num_sequences = of, num_tokens, num_sequences
        self._num_cached = 0
        of.num_tokens += num_tokens
        of.num_sequences += num_sequences

    def measure(self, delta: OutputDelta, num_tokens: int) -> None:
        """A delta of a sequence of so many tokens that was prefilled here; the last one has the times."""
        self._num_cached = max(self._num_cached, delta.cached_tokens)
        usage = delta.device_usage
        if usage is not None and usage.prefill_seconds > 0.0:
            self._of.measure(num_tokens - self._num_cached, usage.prefill_seconds)

    def has_prefilled(self) -> None:
        """Its first token is there. May be called again."""
        self._of.num_tokens -= self._num_tokens
        self._num_tokens = 0

    def end(self) -> None:
        """May be called again."""
        self.has_prefilled()
        self._of.num_sequences -= self._num_sequences
        self._num_sequences = 0
