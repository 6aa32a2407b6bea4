"""OpenAI batch files: one request a line in, one answer a line out, through the same handlers as over HTTP.

Resumable: lines of the output file are kept and their requests skipped. A line's answer is known by its custom_id; a line
that has none of its own (bad JSON, a repeated custom_id) by its number and contents, which its answer's id holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.backend import Overloaded, Unavailable
from server.openai import chat, completions
from server.openai.body import check, read_json
from server.openai.errors import ApiError, from_exception, from_validation
from server.openai.protocol import ChatRequest, CompletionRequest
from server.openai.service import Service


class BatchLine(BaseModel):
    """A line of the input file. The body is checked later, by its URL's handler."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str = Field(min_length=1)
    method: str = Field(pattern="^POST$")
    url: str
    body: dict[str, Any]


class BatchFileError(ValueError):
    """An output file that isn't one."""


class BatchStopped(Exception):
    """The backend failed under way. What was answered is in the output file; running the batch again does the rest."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    num_answered: int  # in this run
    num_failed: int  # of them, answered with an error
    num_kept: int  # answered by an earlier run


@dataclass(frozen=True, slots=True)
class _Task:
    id: str
    custom_id: str | None
    line: BatchLine | None
    error: ApiError | None  # what is wrong with the line itself


async def run_batch(
    service: Service, source: Path, target: Path, *, concurrency: int, advance: Callable[[int], None] = lambda count: None
) -> BatchResult:
    """Answer every line of `source` that `target` doesn't hold yet, `concurrency` at a time; answers are appended as they come.

    `advance` is called with a number of lines done. Raises `OSError` for files that can't be read or written, `BatchFileError`
    for an output file that holds something else, and `BatchStopped`."""
    answered = _read_answered(source, target)
    tasks = _tasks(source, answered)
    counts = {"kept": 0, "answered": 0, "failed": 0}
    with target.open("ab") as out:

        async def work() -> None:
            for task in tasks:  # one iterator for all workers: each takes the next line when it is free
                if task is None:
                    counts["kept"] += 1
                else:
                    answer = await _answer(service, task)
                    _write(out, answer)
                    counts["answered"] += 1
                    counts["failed"] += answer["error"] is not None or answer["response"]["status_code"] != 200
                advance(1)

        workers = [asyncio.create_task(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        except Unavailable as error:
            raise BatchStopped(str(error)) from error
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return BatchResult(counts["answered"], counts["failed"], counts["kept"])


def count_lines(source: Path) -> int:
    """Requests in an input file: its lines that aren't blank."""
    with source.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def _read_answered(source: Path, target: Path) -> set[str]:
    """The custom_ids and ids that an output file holds. Cuts off a last line that a killed run left unfinished."""
    answered: set[str] = set()
    if not target.exists():
        return answered
    if target.samefile(source):
        raise BatchFileError(f"{source} is both input and output: name another output file")
    with target.open("r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n"):  # torn: its request is done again
                break
            answer = _read_answer(line)
            if answer is None:
                raise BatchFileError(
                    f"{target} has a line that is no batch answer, at byte {end}: name another output file, or remove this one"
                )
            end += len(line)
            answered.add(answer["id"])
            if answer["response"] is not None:
                answered.add(_as_custom(answer["custom_id"]))
        file.truncate(end)
    return answered


def _read_answer(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and {"id", "custom_id", "response"} <= answer.keys() else None


def _as_custom(custom_id: object) -> str:
    return f"custom_id {custom_id}"  # apart from the ids in one set


def _tasks(source: Path, answered: set[str]) -> Iterator[_Task | None]:
    """What is to do for each line of the input, in order; None for one already answered."""
    seen: set[str] = set()
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            task = _read_line(raw, f"batch_req_{number}_{hashlib.sha256(raw.strip()).hexdigest()[:12]}")
            if task.error is None and task.custom_id in seen:
                message = f"custom_id {task.custom_id!r} was used by an earlier line: give each line its own"
                task = replace(task, error=ApiError(400, message, code="duplicate_custom_id"))
            elif task.error is None and task.custom_id is not None:
                seen.add(task.custom_id)
            is_answered = task.id in answered or (task.error is None and _as_custom(task.custom_id) in answered)
            yield None if is_answered else task


def _read_line(raw: bytes, id: str) -> _Task:
    try:
        data = read_json(raw, "the line")
    except ApiError as error:
        return _Task(id, None, None, error)
    named = data.get("custom_id") if isinstance(data, dict) else None
    custom_id = named if isinstance(named, str) else None
    try:
        return _Task(id, custom_id, BatchLine.model_validate(data), None)
    except ValidationError as error:
        return _Task(id, custom_id, None, from_validation(error, BatchLine))


async def _answer(service: Service, task: _Task) -> dict[str, Any]:
    """The output line. Raises `Unavailable` when the backend has failed: then there is no answer."""
    answer = {"id": task.id, "custom_id": task.custom_id, "response": None, "error": None}
    if task.error is not None:
        return answer | {"error": {"code": task.error.code, "message": task.error.message}}
    assert task.line is not None
    status, body = await _respond(service, task.line)
    return answer | {"response": {"status_code": status, "request_id": task.id.replace("batch_req", "req"), "body": body}}


async def _respond(service: Service, line: BatchLine) -> tuple[int, dict[str, Any]]:
    """The HTTP status and body that the same request over HTTP would get."""
    while True:
        try:
            return 200, (await _handle(service, line)).model_dump()
        except Unavailable:
            raise
        except Overloaded as error:  # a batch has time
            await asyncio.sleep(min(error.retry_after, 1.0))
        except Exception as error:
            answer = from_exception(error)
            return answer.status, answer.body()


async def _handle(service: Service, line: BatchLine) -> BaseModel:
    if line.body.get("stream"):
        raise ApiError(400, "stream is true: a batch's answers come whole, leave it out", param="stream", code="unsupported_parameter")
    match line.url:
        case "/v1/chat/completions":
            return await chat.respond(service, check(line.body, ChatRequest))
        case "/v1/completions":
            return await completions.respond(service, check(line.body, CompletionRequest))
    raise ApiError(404, f"url is {line.url[:80]!r}: /v1/chat/completions and /v1/completions are served", param="url", code="unknown_url")


def _write(out: BinaryIO, answer: dict[str, Any]) -> None:
    """One line in one write, flushed: a killed run leaves at most one torn line, the last."""
    out.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
    out.flush()
