"""Pace: how fast a mesh prefills, as measured, and how many prompt tokens a step may take to hold the latency targets. Imports no JAX."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest measurement


class Pace:
    """`target_ttft` and `target_itl` in seconds, None for none. `delays_decode`: both programs run on one mesh, so that a prefill step
    makes every running sequence wait.

    The step takes no more tokens than leave the running sequences' inter-token latency within its target, and no more than those that
    wait need for theirs to the first token: a smaller step delays whoever runs by less. Where both can't be held the running
    sequences' goes first: theirs is the promise already given.
    """

    def __init__(
        self, buckets: tuple[int, ...], target_ttft: float | None = None, target_itl: float | None = None, *, delays_decode: bool = True
    ) -> None:
        self._buckets = buckets
        self._target_ttft, self._target_itl = target_ttft, target_itl
        self._delays_decode = delays_decode
        self._seconds: dict[int, float] = {}  # a step of each bucket, as measured

    @property
    def steers(self) -> bool:
        """Whether there is any target to hold."""
        return self._target_ttft is not None or self._target_itl is not None

    def observe(self, bucket: int, seconds: float) -> None:
        """A step of a bucket took so long."""
        known = self._seconds.get(bucket)
        self._seconds[bucket] = seconds if known is None else known + _WEIGHT * (seconds - known)

    def step_seconds(self, bucket: int) -> float:
        """What a step of a bucket takes; by its size from the nearest one measured, 0 before any was."""
        if not self._seconds:
            return 0.0
        nearest = min(self._seconds, key=lambda known: max(known, bucket) / min(known, bucket))
        return self._seconds[nearest] * bucket / nearest

    def seconds_to_compute(self, num_tokens: int) -> float:
        """What prefilling that many tokens takes, infinity before anything was measured: then whatever is at hand is quicker."""
        if not self._seconds:
            return float("inf")
        largest = self._buckets[-1]
        whole, rest = divmod(num_tokens, largest)
        last = next(bucket for bucket in self._buckets if bucket >= rest) if rest else 0
        return whole * self.step_seconds(largest) + (self.step_seconds(last) if last else 0.0)

    def budget(self, num_running: int, decode_seconds: float, backlog: int, oldest_wait: float) -> int:
        """Tokens for the next step. `decode_seconds`: what a decode step takes; `backlog`: prompt tokens of all that wait for their first
        token, the oldest since `oldest_wait` seconds."""
        if not self._delays_decode or not num_running or not self.steers:
            return self._buckets[-1]
        allowed = [
            bucket for bucket in self._buckets if self._target_itl is None or self.step_seconds(bucket) + decode_seconds <= self._target_itl
        ] or [self._buckets[0]]
        if self._target_ttft is None:
            return allowed[-1]
        left = self._target_ttft - oldest_wait
        in_time = (b for b in allowed if -(-backlog // b) * (self.step_seconds(b) + decode_seconds) <= left)
        return next(in_time, allowed[-1])
