"""The size of prefill chunks: how fast a mesh prefills, as measured, and how many prompt tokens a step may take to hold the latency targets. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.runtime.buckets import bucket_for, prefill_rows

_WEIGHT = 0.2  # of the newest measurement
_CAUTION = 2.0  # deviations above the mean: what nine steps of ten stay below, since half of them exceed the mean
_DRIFT = 0.02  # weight of the newest measurement in what a bucket takes beside the others
_MOST_AT_ONCE = 3.0  # how much slower or quicker than of late a step may count


@dataclass(slots=True)
class _Average:
    """A running mean and mean deviation, as TCP keeps them of round trips (Jacobson, 1988)."""

    mean: float
    deviation: float = 0.0

    def observe(self, value: float) -> None:
        error = value - self.mean
        self.mean += _WEIGHT * error
        self.deviation += _WEIGHT * (abs(error) - self.deviation)

    def cautious(self) -> float:
        return self.mean + _CAUTION * self.deviation


class ChunkSizeController:
    """`target_ttft` and `target_itl` in seconds, None for none. `delays_decode`: both programs run on one mesh, so that a prefill step
    makes every running sequence wait.

    The step takes no more tokens than leave the running sequences' inter-token latency within its target, and no more than those that
    wait need for theirs to the first token: a smaller step delays whoever runs by less. Where both can't be held the running
    sequences' goes first: theirs is the promise already given. Where not even the smallest step leaves it room, it is the smallest.

    What a step takes is what its bucket takes when all is quiet, times how much slower than that steps of any bucket are of late: so buckets
    that are not in use follow a mesh that gets slower or quicker, and none is ruled out for ever by one slow step.
    """

    def __init__(
        self, buckets: tuple[int, ...], target_ttft: float | None = None, target_itl: float | None = None, *, delays_decode: bool = True
    ) -> None:
        self._buckets = buckets
        self._target_ttft, self._target_itl = target_ttft, target_itl
        self._delays_decode = delays_decode
        self._quiet: dict[int, float] = {}  # seconds that a step of each bucket takes
        self._slowness = _Average(1.0)
        self._decode: _Average | None = None

    @property
    def steers(self) -> bool:
        """Whether there is any target to hold."""
        return self._target_ttft is not None or self._target_itl is not None

    def observe(self, bucket: int, seconds: float) -> None:
        """A step of a bucket took so long."""
        if bucket not in self._quiet:
            self._quiet[bucket] = max(seconds, 1e-9) / self._slowness.mean
            return
        least, most = self._slowness.mean / _MOST_AT_ONCE, self._slowness.mean * _MOST_AT_ONCE
        slowness = min(max(seconds / self._quiet[bucket], least), most)
        self._slowness.observe(slowness)
        self._quiet[bucket] *= 1 + _DRIFT * (slowness / self._slowness.mean - 1)

    def observe_decode(self, seconds: float) -> None:
        """A decode step took so long; 0: none has ended yet."""
        if not seconds:
            return
        if self._decode is None:
            self._decode = _Average(seconds)
        else:
            self._decode.observe(seconds)

    def seconds_to_compute(self, num_tokens: int) -> float:
        """What prefilling that many tokens takes, infinity before anything was measured: then whatever is at hand is quicker."""
        if not self._quiet:
            return float("inf")
        whole, rest = divmod(num_tokens, self._buckets[-1])
        seconds = whole * self._quiet_seconds(self._buckets[-1]) + (self._quiet_seconds(bucket_for(rest, self._buckets)) if rest else 0.0)
        return seconds * self._slowness.mean

    def budget(self, num_running: int, waiting: Sequence[tuple[int, float]]) -> int:
        """Tokens for the next step. `waiting`: of each prompt that waits for its first token, as they are served, the tokens still to be
        computed, in whole tiles, and for how many seconds it has waited."""
        if not self._delays_decode or not num_running or not self.steers:
            return self._buckets[-1]
        decode_seconds = 0.0 if self._decode is None else self._decode.cautious()
        slowness = self._slowness.cautious()
        turns = {bucket: self._quiet_seconds(bucket) * slowness + decode_seconds for bucket in self._buckets}
        itl, ttft = self._target_itl, self._target_ttft
        allowed = [bucket for bucket in self._buckets if itl is None or turns[bucket] <= itl] or [self._buckets[0]]
        if ttft is None:
            return allowed[-1]
        return next((bucket for bucket in allowed if _are_in_time(waiting, bucket, turns[bucket], ttft)), allowed[-1])

    def _quiet_seconds(self, bucket: int) -> float:
        """By its size from the nearest bucket, for one that was never measured; 0 before any was."""
        if not self._quiet:
            return 0.0
        nearest = min(self._quiet, key=lambda known: max(known, bucket) / min(known, bucket))
        return self._quiet[nearest] * bucket / nearest


def _are_in_time(waiting: Sequence[tuple[int, float]], bucket: int, turn: float, target: float) -> bool:
    """Whether each has its first token in time with a step of this bucket in each turn, that many seconds long."""
    num_tokens = 0
    for num_prompts, (tokens, waited) in enumerate(waiting, 1):
        num_tokens += tokens
        num_turns = max(-(-num_tokens // bucket), -(-num_prompts // prefill_rows(bucket)))
        if waited + (num_turns + 1) * turn > target:  # the device has a turn to do that was launched before
            return False
    return True
