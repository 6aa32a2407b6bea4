"""How many workers a pool should have. Pure: what is seen goes in with its time, a number comes out; no Ray, no clock.

Prefill's pool follows the tokens that come and those that wait, decode's the sequences that run, each against what one
worker does. More are wanted at once; fewer only down to what was needed at any time of the last minute, and never
fewer than running requests need.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingSettings:
    """Seconds, but for `utilisation`: the share of what a worker can do that it is to be given."""

    target_ttft: float = 2.0
    target_itl: float = 0.1
    utilisation: float = 0.75
    averaged_over: float = 30.0  # what comes, and what runs
    patience: float = 60.0  # that fewer must have been enough before the rest goes


DEFAULT_SCALING = ScalingSettings()


@dataclass(frozen=True)
class PoolBounds:
    """Workers."""

    minimum: int = 1
    maximum: int = 1


@dataclass(frozen=True)
class PoolView:
    """What is seen of a pool. `seconds`: when, by any clock. `num_workers`: ready or starting, without those that
    drain. `num_pending_tokens`: of prompts, to compute; `num_arrived_tokens`: a counter of those that came, cached ones
    left out; `tokens_per_second`: a worker's, of prefill, 0 before it is measured; `num_sequences`: that decode has, or
    waits for; `itl`: seconds between tokens, None if unknown."""

    seconds: float
    num_workers: int
    num_pending_tokens: int = 0
    num_arrived_tokens: int = 0
    tokens_per_second: float = 0.0
    num_sequences: int = 0
    max_batch_size: int = 1
    itl: float | None = None


class PoolScaler:
    """Of one pool of a role. Ask it every few seconds."""

    def __init__(self, role: str, bounds: PoolBounds, settings: ScalingSettings) -> None:
        self._role, self._bounds, self._settings = role, bounds, settings
        self._last: PoolView | None = None
        self._load = 0.0  # averaged: tokens that come a second, or sequences
        self._recent: deque[tuple[float, int]] = deque()  # how many were needed when, from `patience` ago on

    def wanted(self, view: PoolView) -> int:
        """How many workers there should be now."""
        self._average(view)
        needed, least = (self._prefill(view), 0) if self._role == "prefill" else self._decode(view)
        recent, since = self._recent, view.seconds - self._settings.patience
        recent.append((view.seconds, needed))
        while len(recent) > 1 and recent[1][0] <= since:
            recent.popleft()
        if needed < view.num_workers:
            highest = max(number for _, number in recent) if recent[0][0] <= since else view.num_workers
            needed = max(min(view.num_workers, highest), least)
        return max(self._bounds.minimum, min(self._bounds.maximum, needed))

    def _average(self, view: PoolView) -> None:
        last, self._last = self._last, view
        passed = 0.0 if last is None else view.seconds - last.seconds
        if last is None or passed <= 0.0:
            self._load = self._load if last is not None or self._role == "prefill" else float(view.num_sequences)
            return
        arrived = max(0, view.num_arrived_tokens - last.num_arrived_tokens)  # a worker that is new counts from 0
        load = arrived / passed if self._role == "prefill" else view.num_sequences
        self._load += (1.0 - math.exp(-passed / self._settings.averaged_over)) * (load - self._load)

    def _prefill(self, view: PoolView) -> int:
        if not view.tokens_per_second:
            return view.num_workers
        for_arrivals = self._load / (view.tokens_per_second * self._settings.utilisation)
        for_queue = view.num_pending_tokens / (view.tokens_per_second * self._settings.target_ttft)
        return math.ceil(max(for_arrivals, for_queue))

    def _decode(self, view: PoolView) -> tuple[int, int]:
        """Also how many the sequences of now need."""
        least = math.ceil(view.num_sequences / view.max_batch_size)
        needed = max(least, math.ceil(self._load / (view.max_batch_size * self._settings.utilisation)))
        if view.itl is not None and view.itl > self._settings.target_itl:
            needed = max(needed, math.ceil(view.num_workers * view.itl / self._settings.target_itl))
        return needed, least
