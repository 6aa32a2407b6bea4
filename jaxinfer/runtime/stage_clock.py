"""StageClock: how long each stage of a pipeline works, and how long it waits for another, as a thread a stage sees it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from jaxinfer.stats import StageTimes

Ended = Future[float]  # when
_BEGIN = "begin"  # to a stage's thread: count anew


class PendingArray(Protocol):
    """An array that devices are yet to fill."""

    def block_until_ready(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Step:
    launched_at: float  # seconds
    ready: PendingArray
    handed_at: Ended | None  # when it was given what another stage made; None: it is given nothing
    ended_at: Ended


class StageClock:
    """A stage runs what it is given in order. A step starts on it once it is given what it takes, by the stage before or, of decode's first, by the
    last one, which made the token, and once the step before it has ended; while only the former is lacking the stage waits. The threads end with
    the clock."""

    def __init__(self, num_stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self.times = [StageTimes() for _ in range(num_stages)]
        self._queues: list[SimpleQueue[_Step | str | None]] = [SimpleQueue() for _ in range(num_stages)]
        for number, (queue, times) in enumerate(zip(self._queues, self.times, strict=True), 1):
            threading.Thread(target=_follow, args=(queue, times, clock), name=f"stage {number}", daemon=True).start()
            weakref.finalize(self, queue.put, None)

    def now(self) -> float:
        """Seconds, of the clock that launches are told by."""
        return self._now()

    def launched(self, number: int, at: float, array: PendingArray, after: Ended | None) -> Ended:
        """A step that was launched at a time fills this array on a stage, not before another has ended what it is to be given. Returns its own end
        on the stage. To be told of each stage's as soon as it is launched: a device may have ended by the time that the next one is."""
        step = _Step(at, array, after, Future())
        self._queues[number].put(step)
        return step.ended_at

    def begin(self) -> None:
        """Forget the steps until now, as programs' first runs, those under way too."""
        for queue in self._queues:
            queue.put(_BEGIN)


def _follow(queue: SimpleQueue[_Step | str | None], times: StageTimes, clock: Callable[[], float]) -> None:
    """A stage's thread, until it is given None."""
    free_at = 0.0
    while (step := queue.get()) is not None:
        if isinstance(step, str):
            times.busy = times.waiting = 0.0  # here, where they are added to: so nothing of a step before comes after
            continue
        with suppress(Exception):  # whoever reads the result is told what went wrong
            step.ready.block_until_ready()
        ended_at = clock()
        step.ended_at.set_result(ended_at)
        could_start = max(free_at, step.launched_at)
        started_at = max(could_start, step.handed_at.result() if step.handed_at is not None else could_start)
        started_at = min(started_at, ended_at)  # two threads' looks at the clock
        times.busy += ended_at - started_at
        times.waiting += max(started_at - could_start, 0.0)
        free_at = ended_at
