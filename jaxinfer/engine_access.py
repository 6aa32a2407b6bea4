"""EngineAccess: who may touch an engine: one thread at a time, in the process that made it, until it is closed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from jaxinfer.request import RequestError

_DRAIN_SECONDS = 1.0  # in which a driver whose last request has ended reads the steps that are still under way


class EngineClosedError(RequestError):
    """The engine was closed, or belongs to the process that this one was forked from: it takes no request any more."""


class EngineAccess:
    """`with access.call():` around each call that touches the engine. A thread that drives it for longer holds it by `drive`, and calls of
    other threads raise `RequestError` meanwhile instead of taking its tokens."""

    def __init__(self, has_requests: Callable[[], bool] = lambda: False) -> None:
        self._has_requests = has_requests
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._driver: int | None = None  # the thread in `drive`
        self._is_closed = False

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the engine's."""
        return os.getpid() != self._pid

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def check(self) -> None:
        """Raise `EngineClosedError` where no request can be taken any more. For any thread; takes no lock, which a fork may have left held."""
        if self.is_forked:
            raise EngineClosedError(
                f"this process was forked from process {self._pid}, which has the engine; devices and threads don't survive a fork: "
                "start children by multiprocessing's 'spawn', and make an LLM in the child"
            )
        if self._is_closed:
            raise EngineClosedError("the engine is closed: nothing can be asked of it any more; make a new one")

    def call(self) -> AbstractContextManager[Any]:
        """The lock of one call. Raises `EngineClosedError`, or `RequestError` while another thread drives the engine."""
        self.check()
        if self._driver is not None and self._driver != threading.get_ident():
            self._await_driver()
        return self._lock

    def _await_driver(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._driver is not None:
            if self._has_requests() or time.monotonic() > deadline:
                raise RequestError(
                    "another thread drives this engine, for requests of an LLM, an AsyncLLM or a server: send requests by these, or wait "
                    "until those under way have ended"
                )
            time.sleep(0.001)

    @contextmanager
    def drive(self) -> Iterator[None]:
        """Within it the engine is this thread's alone. Waits for the end of another thread's call."""
        with self._lock:
            self._driver = threading.get_ident()
            try:
                yield
            finally:
                self._driver = None

    def close(self) -> None:
        """Let no more calls in."""
        self._is_closed = True
