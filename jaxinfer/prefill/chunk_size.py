"""ChunkSizeController: prefill speed as measured, and how many prompt tokens a step may take within the latency
targets. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.programs.buckets import bucket_for, prefill_rows

_WEIGHT = 0.2  # of the newest measurement
_CAUTION = 2.0  # deviations above the mean; about nine steps of ten stay below
_DRIFT = 0.02  # weight of the newest measurement in a bucket's time relative to others
_MOST_AT_ONCE = 3.0  # the largest factor by which one step may count as slower or faster than recently


@dataclass(slots=True)
class _Average:
    """A running mean and mean deviation, as in TCP's round-trip estimate (Jacobson, 1988)."""

    mean: float
    deviation: float = 0.0

    def observe(self, value: float) -> None:
        error = value - self.mean
        self.mean += _WEIGHT * error
        self.deviation += _WEIGHT * (abs(error) - self.deviation)

    def cautious(self) -> float:
        return self.mean + _CAUTION * self.deviation


class ChunkSizeController:
    """Chooses the size of prefill chunks by latency targets.

    `target_ttft` and `target_itl` in seconds, None for none. `delays_decode`: both programs share a mesh, so a prefill
    step delays every running sequence.

    A step takes no more tokens than running sequences' inter-token latency allows, and no more than waiting prompts
    need for their time to first token: a smaller step delays running sequences less. If both targets can't be met, the
    inter-token latency wins, which running requests were promised already. If even the smallest step exceeds it, the
    step is the smallest.

    A step's predicted time is its bucket's time without load, times the recent slowdown of steps of all buckets. So the
    predictions of unused buckets follow a mesh that gets slower or faster, and one slow step rules out no bucket for
    ever.
    """

    def __init__(
        self, buckets: tuple[int, ...], target_ttft: float | None = None, target_itl: float | None = None, *, delays_decode: bool = True
    ) -> None:
        self._buckets = buckets
        self._target_ttft, self._target_itl = target_ttft, target_itl
        self._delays_decode = delays_decode
        self._quiet: dict[int, float] = {}  # seconds of each bucket's step without load
        self._slowness = _Average(1.0)
        self._decode: _Average | None = None

    @property
    def steers(self) -> bool:
        """Whether there is any target."""
        return self._target_ttft is not None or self._target_itl is not None

    def observe(self, bucket: int, seconds: float) -> None:
        """Record the time of a prefill step."""
        if bucket not in self._quiet:
            self._quiet[bucket] = max(seconds, 1e-9) / self._slowness.mean
            return
        least, most = self._slowness.mean / _MOST_AT_ONCE, self._slowness.mean * _MOST_AT_ONCE
        slowness = min(max(seconds / self._quiet[bucket], least), most)
        self._slowness.observe(slowness)
        self._quiet[bucket] *= 1 + _DRIFT * (slowness / self._slowness.mean - 1)

    def observe_decode(self, seconds: float) -> None:
        """Record the time of a decode step; 0 if none has ended yet."""
        if not seconds:
            return
        if self._decode is None:
            self._decode = _Average(seconds)
        else:
            self._decode.observe(seconds)

    def seconds_to_compute(self, num_tokens: int) -> float:
        """Predicted seconds to prefill this many tokens; infinity before any measurement, so that any cache counts as
        faster."""
        if not self._quiet:
            return float("inf")
        whole, rest = divmod(num_tokens, self._buckets[-1])
        seconds = whole * self._quiet_seconds(self._buckets[-1]) + (self._quiet_seconds(bucket_for(rest, self._buckets)) if rest else 0.0)
        return seconds * self._slowness.mean

    def budget(self, num_running: int, waiting: Sequence[tuple[int, float]]) -> int:
        """Tokens for the next step. `waiting`: for each prompt without its first token, in scheduling order, the tokens
        still to compute (in whole tiles) and the seconds it has waited."""
        if not self._delays_decode or not num_running or not self.steers:
            return self._buckets[-1]
        decode_seconds = 0.0 if self._decode is None else self._decode.cautious()
        slowness = self._slowness.cautious()
        iteration_seconds = {bucket: self._quiet_seconds(bucket) * slowness + decode_seconds for bucket in self._buckets}
        itl, ttft = self._target_itl, self._target_ttft
        allowed = [bucket for bucket in self._buckets if itl is None or iteration_seconds[bucket] <= itl] or [self._buckets[0]]
        if ttft is None:
            return allowed[-1]
        return next((bucket for bucket in allowed if _are_in_time(waiting, bucket, iteration_seconds[bucket], ttft)), allowed[-1])

    def _quiet_seconds(self, bucket: int) -> float:
        """A bucket's time; if never measured, scaled from the nearest bucket; 0 before any measurement."""
        if not self._quiet:
            return 0.0
        nearest = min(self._quiet, key=lambda known: max(known, bucket) / min(known, bucket))
        return self._quiet[nearest] * bucket / nearest


def _are_in_time(waiting: Sequence[tuple[int, float]], bucket: int, iteration: float, target: float) -> bool:
    """Whether each prompt meets its target with a step of this bucket in each iteration, of that many seconds."""
    num_tokens = 0
    for num_prompts, (tokens, waited) in enumerate(waiting, 1):
        num_tokens += tokens
        num_iterations = max(-(-num_tokens // bucket), -(-num_prompts // prefill_rows(bucket)))
        if waited + (num_iterations + 1) * iteration > target:  # the device still runs one launched before
            return False
    return True
