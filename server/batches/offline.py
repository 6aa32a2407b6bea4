"""`jaxinfer batch`: OpenAI batch files without a server, one request a line in, one answer a line out.

Resumable: lines of the output file are kept and their requests skipped. A line's answer is identified by its custom_id.
A line without a custom_id of its own (bad JSON, a repeated one) is identified by its number and contents, which its
answer's id contains.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.config import ConfigError
from server.backend import Unavailable
from server.batches.lines import BatchLine, answer_line, encoded_beside, is_failure, read_line
from server.openai.errors import ApiError
from server.openai.service import Service


class BatchFileError(ConfigError):
    """An input or output file that can't be used; the message names it and says what to change."""


class BatchStopped(Exception):
    """The backend failed. What was answered is in the output file; running the batch again does the rest."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    num_answered: int  # in this run
    num_failed: int  # answered with an error
    num_kept: int  # answered by an earlier run


@dataclass(frozen=True, slots=True)
class _Task:
    id: str
    custom_id: str | None
    line: BatchLine | ApiError  # or its error


async def run_batch(
    service: Service, source: Path, target: Path, *, concurrency: int, advance: Callable[[int], None] = lambda count: None
) -> BatchResult:
    """Answers every line of `source` that has no answer in `target`, `concurrency` at a time; answers are appended as
    they come.

    `advance` is called with a number of finished lines. Raises `OSError` for files that can't be read or written,
    `BatchFileError` for an output file with other contents, and `BatchStopped`.
    """
    answered = _read_answered(source, target)
    tasks = _tasks(source, answered, service.config.strict_parameters)
    counts = {"kept": 0, "answered": 0, "failed": 0}
    with target.open("ab") as out:

        async def work() -> None:
            for task in tasks:  # one iterator for all workers: each gets the next line when it is free
                if task is None:
                    counts["kept"] += 1
                else:
                    answer = await answer_line(service, task.id, task.custom_id, task.line)
                    _write(out, await encoded_beside(answer))
                    counts["answered"] += 1
                    counts["failed"] += is_failure(answer)
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


def check_files(source: Path, target: Path) -> int:
    """The number of requests in an input file: its lines that aren't blank. Raises `BatchFileError` for an input that
    can't be read and an output that can't be written. Leaves no new file."""
    try:
        with source.open("rb") as lines:
            count = sum(bool(line.strip()) for line in lines)
    except OSError as error:
        raise BatchFileError(f"input is {source}: {error.strerror}; name a file of batch lines (JSON) that can be read") from error
    is_new = not os.path.lexists(target)
    try:
        target.open("ab").close()
    except OSError as error:
        raise BatchFileError(f"output is {target}: {error.strerror}; name a file that can be written, in a folder there is") from error
    if is_new:
        target.unlink()
    elif target.samefile(source):
        raise BatchFileError(f"{source} is both input and output: name another output file")
    return count


def _read_answered(source: Path, target: Path) -> set[str]:
    """The custom_ids and ids in an output file. Cuts off a last line that a killed run left unfinished."""
    answered: set[str] = set()
    if not target.exists():
        return answered
    if target.samefile(source):
        raise BatchFileError(f"{source} is both input and output: name another output file")
    with target.open("r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n"):  # torn: its request is run again
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
    return f"custom_id {custom_id}"  # distinct from the ids in the same set


def _tasks(source: Path, answered: set[str], is_strict: bool) -> Iterator[_Task | None]:
    """The task for each line of the input, in order; None for one already answered."""
    seen: set[str] = set()
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            id = f"batch_req_{number}_{hashlib.sha256(raw.strip()).hexdigest()[:12]}"
            custom_id, line = read_line(raw, is_strict=is_strict)
            if isinstance(line, BatchLine):
                if line.custom_id in seen:
                    message = f"custom_id {custom_id!r} was used by an earlier line: give each line its own"
                    line = ApiError(400, message, code="duplicate_custom_id")
                else:
                    seen.add(line.custom_id)
            is_answered = id in answered or (isinstance(line, BatchLine) and _as_custom(line.custom_id) in answered)
            yield None if is_answered else _Task(id, custom_id, line)


def _write(out: BinaryIO, line: bytes) -> None:
    """One line in one write, flushed: a killed run leaves at most one torn line, the last."""
    out.write(line)
    out.flush()
