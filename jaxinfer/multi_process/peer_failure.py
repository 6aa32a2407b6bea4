"""Ends a process whose engine has lost a peer. Imports neither JAX nor gRPC."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

PROCESS_LOST = 75  # exit status, which systems know as a failure that passes: start all processes again
_GRACE = 5.0  # seconds that a process gets to end by itself once another is gone


class ProcessLostError(ConnectionError):
    """Another process is gone, and with it a part of the weights and pages: all must be started again."""


class PeerFailureMonitor:
    """Ends this process soon after another is gone, whatever it is doing: who waits for a device waits for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[ProcessLostError], None]] = []
        self.reason: str | None = None
        self.is_lost = threading.Event()

    def on_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        """Have it called once, in a thread of its own: the one that drives the engine may wait for a device for ever."""
        with self._lock:
            if self.reason is None:
                self._listeners.append(listener)
                return
        listener(ProcessLostError(self.reason))

    def report_lost(self, reason: str) -> None:
        """Say why, once, and give the program `_GRACE` seconds to end with an error of its own."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            _LOG.critical("%s; this process ends too", reason)  # whoever else is told waits: it may end the process at once
        self.is_lost.set()
        timer = threading.Timer(_GRACE, self.end)
        timer.daemon = True
        timer.start()
        threading.Thread(target=self._tell, name="process-lost", daemon=True).start()

    def check(self) -> None:
        """Raise `ProcessLostError` if another process is gone."""
        if self.reason is not None:
            raise ProcessLostError(self.reason)

    def end(self) -> None:
        """End this process with `PROCESS_LOST`, without JAX's own end, which waits for the others and aborts."""
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
            except Exception as error:  # one listener's fault is not the others'
                _LOG.error("a listener failed: %s: %s", type(error).__name__, error)
