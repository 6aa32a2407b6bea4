"""The usage log: JSON lines appended to a file, a line a request, by a thread of its own."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from logging.handlers import QueueListener, WatchedFileHandler
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from jaxinfer.config import ConfigError

logger = logging.getLogger(__name__)


class UsageLog:
    """Open until its context is left, which waits for the lines still to be written. Writing blocks no caller, and a
    file that was moved away by rotation is replaced by a new one. Raises `ConfigError` for a file that can't be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = _File(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"usage_log is {path!r}: {error.strerror}; name a file that can be written, in a folder there is") from error
        self._lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
        self._writer = QueueListener(self._lines, self._file)
        self._writer.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Queues a line."""
        self._lines.put(logging.makeLogRecord({"msg": json.dumps(line)}))

    def flush(self, timeout: float) -> None:
        """Waits, at most `timeout` seconds, until the lines are written. Nothing may be written afterwards."""
        closing = threading.Thread(target=self._writer.stop, daemon=True)  # a disk may hang
        closing.start()
        closing.join(timeout)

    def __enter__(self) -> UsageLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.stop()
        self._file.close()


class _File(WatchedFileHandler):
    """A line that can't be written, such as to a full disk, goes to the server's log: it may be needed for billing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Also catches what opening the file again raises, which would end the thread."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Called while the exception is being handled."""
        logger.error("the usage log can't be written (%s); its line: %s", sys.exc_info()[1], record.getMessage())
