"""Ends a process whose engine has lost a peer process. Imports neither JAX nor gRPC."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

PROCESS_LOST = 75  # exit status EX_TEMPFAIL: start all processes again
_GRACE = 5.0  # seconds for a process to end by itself after another is lost


class ProcessLostError(ConnectionError):
    """Another process is lost, and with it a part of the weights and pages: all must be started again."""


class PeerFailureMonitor:
    """Ends this process soon after another is lost: a thread that waits for a device may wait for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[ProcessLostError], None]] = []
        self.reason: str | None = None
        self.is_lost = threading.Event()

    def on_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        """Call the listener once, in a thread of its own: the thread that drives the engine may be blocked for ever."""
        with self._lock:
            if self.reason is None:
                self._listeners.append(listener)
                return
        listener(ProcessLostError(self.reason))

    def report_lost(self, reason: str) -> None:
        """Record the reason, once, and give the program `_GRACE` seconds to end with its own error."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            # Under the lock: a listener may end the process at once.
            _LOG.critical("%s; this process ends too", reason)
        self.is_lost.set()
        timer = threading.Timer(_GRACE, self.end)
        timer.daemon = True
        timer.start()
        threading.Thread(target=self._tell, name="process-lost", daemon=True).start()

    def check(self) -> None:
        """Raise `ProcessLostError` if another process is lost."""
        if self.reason is not None:
            raise ProcessLostError(self.reason)

    def end(self) -> None:
        """End this process with `PROCESS_LOST`, without JAX's exit handler, which waits for the others and aborts."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(PROCESS_LOST)

    def _tell(self) -> None:
        for listener in self._listeners:
            try:
                listener(ProcessLostError(self.reason))
            except Exception as error:  # other listeners are still called
                _LOG.error("a listener failed: %s: %s", type(error).__name__, error)
