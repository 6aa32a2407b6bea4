"""StageClock: how long each pipeline stage works, and how long it waits for another. One thread observes each stage."""

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

Ended = Future[float]  # when, in seconds
_BEGIN = "begin"  # to a stage's thread: restart the count


class PendingArray(Protocol):
    """An array that a device has yet to compute."""

    def block_until_ready(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _StageStep:
    launched_at: float  # seconds
    ready: PendingArray
    handed_at: Ended | None  # when its input from another stage was ready; None: it needs none
    ended_at: Ended


class StageClock:
    """A stage runs its steps in order. A step can start once the step before it has ended and its input is there: from
    the stage before, or for decode's first stage the token from the last stage. A stage waits while only the input is
    missing. The threads end with the clock."""

    def __init__(self, num_stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self.times = [StageTimes() for _ in range(num_stages)]
        self._queues: list[SimpleQueue[_StageStep | str | None]] = [SimpleQueue() for _ in range(num_stages)]
        for number, (queue, times) in enumerate(zip(self._queues, self.times, strict=True), 1):
            threading.Thread(target=_follow, args=(queue, times, clock), name=f"stage {number}", daemon=True).start()
            weakref.finalize(self, queue.put, None)

    def now(self) -> float:
        """Seconds, of the clock that `launched` expects."""
        return self._now()

    def launched(self, number: int, at: float, array: PendingArray, after: Ended | None) -> Ended:
        """Report a step launched at time `at` whose result on stage `number` is `array`; it takes its input from the
        step of `after`. Returns the end of this step on this stage. Report each stage's launch at once: a device may
        have ended before the next stage is launched."""
        step = _StageStep(at, array, after, Future())
        self._queues[number].put(step)
        return step.ended_at

    def begin(self) -> None:
        """Discard all steps so far, those in flight too, such as warm-up."""
        for queue in self._queues:
            queue.put(_BEGIN)


def _follow(queue: SimpleQueue[_StageStep | str | None], times: StageTimes, clock: Callable[[], float]) -> None:
    """A stage's thread, until it is given None."""
    free_at = 0.0
    while (step := queue.get()) is not None:
        if isinstance(step, str):
            times.busy = times.waiting = 0.0  # reset in the thread that adds to them, so no earlier step counts
            continue
        with suppress(Exception):  # the reader of the result gets the error
            step.ready.block_until_ready()
        ended_at = clock()
        step.ended_at.set_result(ended_at)
        could_start = max(free_at, step.launched_at)
        started_at = max(could_start, step.handed_at.result() if step.handed_at is not None else could_start)
        started_at = min(started_at, ended_at)  # two threads read the clock
        times.busy += ended_at - started_at
        times.waiting += max(started_at - could_start, 0.0)
        free_at = ended_at
