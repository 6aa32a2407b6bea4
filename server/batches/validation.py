"""Checks a batch's input file before any of its lines runs: one invalid line fails the whole batch, as in OpenAI's API.

A line that is not valid Unicode doesn't count: it gets an error as its answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from server.batches.lines import INVALID_UNICODE, BatchLine, read_line
from server.openai.errors import ApiError, quoted

MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 50  # reported of one file


@dataclass(frozen=True, slots=True)
class LineError:
    """An error of an input file, in OpenAI's terms. `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class LinePlace:
    """The location of a request in its input file; `number` is its line, from 1, blank ones counted."""

    number: int
    position: int  # bytes before it
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """Either errors or lines. `model` is the model of every line, None if they differ."""

    errors: tuple[LineError, ...] = ()
    lines: tuple[LinePlace, ...] = ()
    model: str | None = None


def check_input(path: Path, endpoint: str, max_line_bytes: int, *, is_strict: bool = False) -> CheckedInput:
    """Checks an input file; `is_strict` as for `read_line`. Raises `OSError` for one that can't be read."""
    errors: list[LineError] = []
    lines: list[LinePlace] = []
    seen: set[str] = set()
    models: set[str | None] = set()
    with path.open("rb") as file:
        for place, raw in _lines(file, max_line_bytes):
            if len(lines) == MAX_LINES:
                message = f"the file has more than {MAX_LINES} requests: spread them over several batches"
                return CheckedInput(errors=(*errors[: MAX_ERRORS - 1], LineError("too_many_tasks", message)))
            if place.num_bytes > max_line_bytes:
                message = f"the line is over {max_line_bytes} bytes, the largest body that is served"
                found: BatchLine | LineError | None = LineError("line_too_large", message, line=place.number)
            else:
                found = _check_line(raw, place.number, endpoint, seen, is_strict)
            if isinstance(found, LineError):
                errors.append(found)
                if len(errors) == MAX_ERRORS:
                    break
                continue
            lines.append(place)
            if found is None:
                continue
            seen.add(found.custom_id)
            model = found.body.get("model")
            models.add(model if isinstance(model, str) else None)
    if not lines and not errors:
        errors.append(LineError("empty_file", "the input file is empty: give it at least one request"))
    if errors:
        return CheckedInput(errors=tuple(errors))
    return CheckedInput(lines=tuple(lines), model=models.pop() if len(models) == 1 else None)


def _lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[LinePlace, bytes]]:
    """The lines that aren't blank. A line that is too long is truncated."""
    number = position = 0
    while start := file.readline(max_line_bytes + 2):
        number += 1
        num_bytes = len(start)
        part = start
        while part and not part.endswith(b"\n"):
            part = file.readline(1 << 20)
            num_bytes += len(part)
        if start.strip() or num_bytes > len(start):
            yield LinePlace(number, position, num_bytes), start
        position += num_bytes


def _check_line(raw: bytes, number: int, endpoint: str, seen: set[str], is_strict: bool) -> BatchLine | LineError | None:
    """None for a line that will get an error as its answer."""
    _, line = read_line(raw, is_strict=is_strict)
    if isinstance(line, ApiError):
        if line.code == INVALID_UNICODE:
            return None
        code = "invalid_json_line" if line.code == "invalid_json" else line.code or "invalid_value"
        return LineError(code, line.message, line.param, number)
    if line.url != endpoint:
        message = f"the line's url is {quoted(line.url)}, the batch's endpoint is {endpoint!r}: give them the same"
        return LineError("url_mismatch", message, "url", number)
    if line.custom_id in seen:
        message = f"custom_id {quoted(line.custom_id)} was used by an earlier line: give each line its own"
        return LineError("duplicate_custom_id", message, "custom_id", number)
    return line
