"""Runs measures in a process of their own, which may hang, crash or lose its GPU; the next process continues after it.

A kernel that waits for ever can only be killed. One that read out of bounds has broken its process's GPU for everything
that follows.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.measure import GpuMeasure, Library, RowResult, seconds

About = dict[str, Any]
Catalog = Callable[[], list[GpuMeasure]]  # created in the child: what measures can't be sent
_START_S = 120.0  # to start Python, the library and CUDA
_MIN_MEASURE_S = 3.0  # least time left that is worth starting a measure
_MAX_ERROR_CHARACTERS = 600  # of an error's message
# silent results of one kernel, after which its other sizes are left out: each would use its whole limit
_MAX_SILENT = 2


class Deadline:
    """When everything must have ended."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds, 0 when it has passed."""
        return max(self._end - self._clock(), 0.0)


@dataclass(frozen=True)
class Row:
    """A result and its measure."""

    measure: GpuMeasure
    found: RowResult

    def __str__(self) -> str:
        what = self.found.failure or (seconds(self.found.times.median) if self.found.times else "")
        return f"{'/'.join(filter(None, (self.measure.key, '' if self.measure.case else self.found.case)))}: {what}"


def run_all(
    catalog: Catalog, measures: Sequence[GpuMeasure], about_of: dict[Library, Callable[[], About]], deadline: Deadline
) -> Iterator[Row | About]:
    """Rows as they come, and each process's report of itself before them. `measures` come from the catalog; each gives
    at least one row, if only a failure. `about_of` is called in the process, once for its library, and raises where
    nothing can run with that."""
    waiting = list(measures)
    has_run: set[Library] = set()
    absent: dict[Library, str] = {}
    failed_starts: Counter[Library] = Counter()
    num_silent: Counter[tuple[str, str]] = Counter()  # by name and way
    while waiting:
        broken = [measure for measure in waiting if num_silent[measure.name, measure.way] >= _MAX_SILENT]
        if broken:
            why = f"left out: {_MAX_SILENT} other sizes gave no answer"
            yield from (Row(measure, RowResult(measure.case, failure=why)) for measure in broken)
            waiting = [measure for measure in waiting if measure not in broken]
            continue
        library = waiting[0].library
        batch = _next_batch(waiting)
        if deadline.left() < _MIN_MEASURE_S or library in absent:
            why = f"absent: {absent[library]}" if library in absent else "left out: no time left"
            yield from (Row(measure, RowResult(measure.case, failure=why)) for measure in batch)
            waiting = waiting[len(batch) :]
            continue
        child = _WorkerProcess(catalog, [measure.key for measure in batch], about_of[library])
        try:
            for message in child.follow(batch, deadline):
                if isinstance(message, _LibraryMissing):
                    failed_starts[library] += 1
                    if failed_starts[library] > len(has_run & {library}):  # one that has run may start once more
                        absent[library] = message.why
                else:
                    has_run.add(library)
                    if isinstance(message, Row) and message.found.is_silent:
                        num_silent[message.measure.name, message.measure.way] += 1
                    yield message
        finally:
            child.end()
        waiting = waiting[child.num_over :]


def _next_batch(waiting: Sequence[GpuMeasure]) -> list[GpuMeasure]:
    """The first measures that need the same library."""
    count = next((i for i, measure in enumerate(waiting) if measure.library != waiting[0].library), len(waiting))
    return list(waiting[:count])


@dataclass(frozen=True)
class _LibraryMissing:
    why: str


class _WorkerProcess:
    """One process over some measures. `num_over` of them have ended when `follow` returns."""

    def __init__(self, catalog: Catalog, keys: list[str], about: Callable[[], About]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(catalog, keys, about, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.num_over = 0

    def follow(self, batch: Sequence[GpuMeasure], deadline: Deadline) -> Iterator[Row | About | _LibraryMissing]:
        until, has_started, has_begun = time.monotonic() + _START_S, False, False
        while self.num_over < len(batch):
            measure = batch[self.num_over]
            kind, value = self._next(min(until - time.monotonic(), deadline.left()))
            is_gone, is_silent = kind in ("ended", "silent"), kind == "silent" and has_begun and deadline.left() > 0
            if kind == "silent":
                value = f"no answer in {measure.limit_s:g} s" if deadline.left() else "no time left"
            if not has_started and (is_gone or kind == "absent"):
                yield _LibraryMissing(value)
                return
            if is_gone and self.num_over and not has_begun:
                return  # between two measures: after one that broke the process
            if kind == "about":
                has_started = True
                yield value
            elif kind == "began":
                until, has_begun = time.monotonic() + measure.limit_s, True
            elif kind == "found":
                yield Row(measure, value)
            else:
                if kind != "done":
                    yield Row(measure, RowResult(measure.case, failure=value, is_silent=is_silent))
                self.num_over, has_begun = self.num_over + 1, False
            if is_gone:
                return

    def _next(self, patience: float) -> tuple[str, Any]:
        try:
            if self._pipe.poll(max(patience, 0.0)):
                message: tuple[str, Any] = self._pipe.recv()
                return message
            return "silent", ""
        except (EOFError, OSError):
            self._process.join(5)
            return "ended", f"the process ended: exit status {self._process.exitcode}"

    def end(self) -> None:
        self._process.kill()
        self._process.join(30)
        self._pipe.close()


def _serve(catalog: Catalog, keys: list[str], about: Callable[[], About], pipe: Connection) -> None:
    """The child process."""
    try:
        pipe.send(("about", about()))
    except Exception as error:
        pipe.send(("absent", _text(error)))
        return
    measures = {measure.key: measure for measure in catalog()}
    for key in keys:
        pipe.send(("began", key))
        began = time.monotonic()
        try:
            for found in measures[key].run():
                pipe.send(("found", replace(found, took_s=round(time.monotonic() - began, 2))))
            pipe.send(("done", key))
        except Exception as error:
            traceback.print_exc()
            pipe.send(("failed", _text(error)))
            if _spoils(error):
                os._exit(0)  # at once: an orderly end waits for the GPU
        gc.collect()  # reference cycles hold device memory


def _spoils(error: Exception) -> bool:
    """Whether the GPU may be unusable for this process now: JAX's and torch's errors at run time are RuntimeErrors."""
    return isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_ERROR_CHARACTERS]
