"""Progress of an engine's start: written by the threads that build it, read by any. Imports no JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartProgress:
    """Tasks in progress; several at once, such as loading weights and compiling programs."""

    def __init__(self, first: str = "opening the model") -> None:
        self._between = first  # shown while there is no task
        self._about = ""
        self._tasks: dict[int, Callable[[], str]] = {}
        self._lock = threading.Lock()

    def describe(self) -> str:
        """As text, such as 'loading weights 40%, compiling 3 of 12'."""
        doing = ", ".join([describe() for describe in list(self._tasks.values())]) or self._between
        return f"{self._about}: {doing}" if self._about else doing

    def about(self, what: str) -> None:
        """Name what is started from now on, one of several."""
        self._about = what

    def note(self, text: str) -> None:
        """Name a task without a measure of progress."""
        self._between = text

    @contextmanager
    def measured(self, what: str, total: float, done: Callable[[], float]) -> Iterator[None]:
        """A task with `done()` of `total` finished; a total of 0 is unknown."""
        with self._task(lambda: f"{what} {min(100, int(100 * done() / total))}%" if total else what):
            yield

    @contextmanager
    def counted(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A task of `total` steps; yields a function to call after each, from any thread."""
        num_done = 0

        def advance() -> None:
            nonlocal num_done
            with self._lock:
                num_done += 1

        with self._task(lambda: f"{what} {num_done} of {total}"):
            yield advance

    @contextmanager
    def _task(self, describe: Callable[[], str]) -> Iterator[None]:
        self._tasks[id(describe)] = describe
        try:
            yield
        finally:
            del self._tasks[id(describe)]
