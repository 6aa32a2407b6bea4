"""Pace: how fast a mesh prefills, as measured, and how many prompt tokens a step may take to hold the latency targets. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.runtime.buckets import bucket_for, prefill_rows

_WEIGHT = 0.2  # of the newest measurement
_CAUTION = 2.0  # deviations above the mean: what nine steps of ten stay below, since half of them exceed the mean


@dataclass(slots=True)
class _Timing:
    """A running mean and mean deviation, in seconds, as TCP keeps them of round trips (Jacobson, 1988)."""

    mean: float
    deviation: float = 0.0

    def observe(self, seconds: float) -> None:
        error = seconds - self.mean
        self.mean += _WEIGHT * error
        self.deviation += _WEIGHT * (abs(error) - self.deviation)

    def cautious(self) -> float:
        return self.mean + _CAUTION * self.deviation


class Pace:
    """`target_ttft` and `target_itl` in seconds, None for none. `delays_decode`: both programs run on one mesh, so that a prefill step
    makes every running sequence wait.

    The step takes no more tokens than leave the running sequences' inter-token latency within its target, and no more than those that
    wait need for theirs to the first token: a smaller step delays whoever runs by less. Where both can't be held the running
    sequences' goes first: theirs is the promise already given. Where not even the smallest step leaves it room, it is the smallest.
    """

    def __init__(
        self, buckets: tuple[int, ...], target_ttft: float | None = None, target_itl: float | None = None, *, delays_decode: bool = True
    ) -> None:
        self._buckets = buckets
        self._target_ttft, self._target_itl = target_ttft, target_itl
        self._delays_decode = delays_decode
        self._steps: dict[int, _Timing] = {}  # of each bucket
        self._decode: _Timing | None = None

    @property
    def steers(self) -> bool:
        """Whether there is any target to hold."""
        return self._target_ttft is not None or self._target_itl is not None

    def observe(self, bucket: int, seconds: float) -> None:
        """A step of a bucket took so long."""
        if bucket in self._steps:
            self._steps[bucket].observe(seconds)
        else:
            self._steps[bucket] = _Timing(seconds)

    def observe_decode(self, seconds: float) -> None:
        """A decode step took so long; 0: none has ended yet."""
        if not seconds:
            return
        if self._decode is None:
            self._decode = _Timing(seconds)
        else:
            self._decode.observe(seconds)

    def seconds_to_compute(self, num_tokens: int) -> float:
        """What prefilling that many tokens takes, infinity before anything was measured: then whatever is at hand is quicker."""
        if not self._steps:
            return float("inf")
        known = {bucket: timing.mean for bucket, timing in self._steps.items()}
        whole, rest = divmod(num_tokens, self._buckets[-1])
        seconds = whole * _step_seconds(self._buckets[-1], known)
        return seconds + _step_seconds(bucket_for(rest, self._buckets), known) if rest else seconds

    def budget(self, num_running: int, waiting: Sequence[tuple[int, float]]) -> int:
        """Tokens for the next step. `waiting`: of each prompt that waits for its first token, as they are served, the tokens still to be
        computed, in whole tiles, and for how many seconds it has waited."""
        if not self._delays_decode or not num_running or not self.steers:
            return self._buckets[-1]
        known = {bucket: timing.cautious() for bucket, timing in self._steps.items()}
        decode_seconds = 0.0 if self._decode is None else self._decode.cautious()
        turns = {bucket: _step_seconds(bucket, known) + decode_seconds for bucket in self._buckets}
        itl, ttft = self._target_itl, self._target_ttft
        allowed = [bucket for bucket in self._buckets if itl is None or turns[bucket] <= itl] or [self._buckets[0]]
        if ttft is None:
            return allowed[-1]
        return next((bucket for bucket in allowed if _are_in_time(waiting, bucket, turns[bucket], ttft)), allowed[-1])


def _step_seconds(bucket: int, known: dict[int, float]) -> float:
    """What a step of a bucket takes, by what is known of any; 0 if that is nothing. A bucket takes no longer than a larger one, nor than
    a smaller one as many times as is needed: so one slow step in a bucket that is then avoided is not held against it for ever."""
    if not known:
        return 0.0
    if bucket not in known:
        nearest = min(known, key=lambda other: max(other, bucket) / min(other, bucket))
        return known[nearest] * bucket / nearest
    return min(seconds * max(1.0, bucket / other) for other, seconds in known.items())


def _are_in_time(waiting: Sequence[tuple[int, float]], bucket: int, turn: float, target: float) -> bool:
    """Whether each has its first token in time with a step of this bucket in each turn, that many seconds long."""
    num_tokens = 0
    for num_prompts, (tokens, waited) in enumerate(waiting, 1):
        num_tokens += tokens
        num_turns = max(-(-num_tokens // bucket), -(-num_prompts // prefill_rows(bucket)))
        if waited + (num_turns + 1) * turn > target:  # the device has a turn to do that was launched before
            return False
    return True
