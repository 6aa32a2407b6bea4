"""Log lines with time, level, and the request and tenant they belong to, as text or as JSON objects."""

from __future__ import annotations

import json
import logging
import re
import sys
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

# other libraries log only warnings
PACKAGES = ("server", "jaxinfer", "checkpoints", "sharding", "pallas_kernels", "uvicorn")
REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


@dataclass(slots=True)
class LoggedRequest:
    """The request that a log line belongs to."""

    id: str
    tenant: str | None = None  # until its key is known
    error: str | None = None  # the code of the error that it was answered with
    is_recorded: bool = False  # in the usage log
    model: str | None = None  # which of several
    traceparent: str = ""  # of the step that it is, where traces are recorded; see `server.tracing`


# tasks and threads of a request inherit it
current_request: ContextVar[LoggedRequest | None] = ContextVar("current_request", default=None)


def note_model(name: str | None) -> None:
    """The current request, if there is one, is for this one of several models."""
    if (request := current_request.get()) is not None:
        request.model = name


def request_id(sent: str | None) -> str:
    """The client's own id, if it is 1 to 128 letters, digits or ._~:/+=@-, and otherwise a new one: a log line must
    contain it unescaped."""
    return sent if sent is not None and REQUEST_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"


def configure(level: str, format: str) -> None:
    """Writes all log lines to standard error, in the format "text" or "json". `level` is that of this project's own
    lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(_add_request)
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]), handlers=[handler], force=True)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """`2026-11-22T14:11:54.123Z WARNING server.graceful [req_5f... key-ca978112ca1b]: the message`"""

    def __init__(self) -> None:
        super().__init__("%(moment)s %(levelname)s %(name)s%(request)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request = _request_of(record)
        record.moment = _moment(record)
        record.request = "" if request is None else f" [{' '.join(filter(None, (request.id, request.tenant)))}]"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, message; request_id and tenant where it belongs to a request, trace_id
    where that is traced; exception where there is one; and what the line has as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        request = _request_of(record)
        line: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request is not None:
            line |= {"request_id": request.id, "tenant": request.tenant}
            if request.traceparent:
                line["trace_id"] = request.traceparent.split("-")[1]
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _add_request(record: logging.LogRecord) -> bool:
    record.request_context = current_request.get()
    return True


def _request_of(record: logging.LogRecord) -> LoggedRequest | None:
    return getattr(record, "request_context", None)


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
