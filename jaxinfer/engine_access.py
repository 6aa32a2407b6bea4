"""EngineAccess: lets one thread at a time use an engine, in the process that made it, until it is closed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from jaxinfer.request import RequestError

_DRAIN_SECONDS = 1.0  # for the driver to read steps in flight after its last request has ended


class EngineClosedError(RequestError):
    """The engine is closed, or belongs to the parent of this forked process: it takes no requests."""


class EngineAccess:
    """`with access.call():` guards each call to the engine. A thread that drives the engine for longer uses `drive`;
    calls of other threads then raise `RequestError` instead of taking its tokens."""

    def __init__(self, has_requests: Callable[[], bool] = lambda: False) -> None:
        self._has_requests = has_requests
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._driver: int | None = None  # the thread in `drive`
        self._is_closed = False

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the engine's process."""
        return os.getpid() != self._pid

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def check(self) -> None:
        """Raise `EngineClosedError` if the engine takes no requests any more. Any thread may call it; it takes no lock,
        since a fork may have copied a held one."""
        if self.is_forked:
            raise EngineClosedError(
                f"this process was forked from process {self._pid}, which has the engine; devices and threads don't survive a fork: "
                "start children by multiprocessing's 'spawn', and make an LLM in the child"
            )
        if self._is_closed:
            raise EngineClosedError("the engine is closed: nothing can be asked of it any more; make a new one")

    def call(self) -> AbstractContextManager[Any]:
        """The lock for one call. Raises `EngineClosedError`, or `RequestError` while another thread drives the
        engine."""
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
        """Makes the engine this thread's for the context's duration. Waits for another thread's call to end."""
        with self._lock:
            self._driver = threading.get_ident()
            try:
                yield
            finally:
                self._driver = None

    def close(self) -> None:
        """Refuse all further calls."""
        self._is_closed = True
