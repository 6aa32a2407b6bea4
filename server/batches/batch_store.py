"""Batches and their lines' answers. Every step of a batch is one transaction, so that a killed process leaves it before
or after the step, never between: validating -> in_progress -> finalizing -> completed or expired; also failed, and
cancelling -> cancelled. A line's answer is stored once, and only while the batch is in progress."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.config import ConfigError
from server.batches.database import Clock, Database
from server.batches.file_store import OPEN_STATUSES, FileStore, StoredFile
from server.batches.lines import encoded, no_answer, read_line
from server.batches.validation import CheckedInput, LineError, LinePlace, check_input

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 24 * 3600  # of the only completion window, "24h"
CHUNK = 256  # rows read at once

_UNANSWERED = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "this request could not be answered before the completion window ended"),
}


class UnknownFile(Exception):
    """A batch's input file that does not exist."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A row of the table `batches`; times are Unix seconds."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None
    output_seconds: int | None  # retention of the output and the error file; None: until they are deleted
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    errors: Sequence[Mapping[str, Any]] | None  # `LineError`s
    model: str | None
    output_file_id: str | None
    error_file_id: str | None
    num_lines: int
    num_completed: int
    num_failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An output line and its token counts."""

    batch_id: str
    number: int
    line: bytes
    is_failure: bool
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


_COLUMNS = ", ".join(field.name for field in fields(StoredBatch))


class BatchStore:
    """The data of /v1/files and /v1/batches, in one folder. Its methods block on the disk, and may be called from any
    thread."""

    def __init__(self, folder: Path, now: Clock = time.time) -> None:
        """Opens or creates the folder. Raises `ConfigError` for one that another process has open or that can't be
        written."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it contains prompts
            self._database = Database(folder / "batches.sqlite3")
            self.files = FileStore(self._database, folder / "files", now)
        except OSError as error:
            raise ConfigError(f"batch_dir is {folder}: {error.strerror}; give a folder that can be written to") from error
        self.now = now

    def close(self) -> None:
        """Lets another process open the folder."""
        self._database.close()

    def create(
        self, tenant: str, input_file_id: str, endpoint: str, metadata: Mapping[str, str] | None, output_seconds: int | None
    ) -> StoredBatch:
        """A new batch, to be validated. Raises `UnknownFile`."""
        id, now = self._database.new_id("batch_"), int(self.now())
        values: dict[str, Any] = {
            "id": id,
            "tenant": tenant,
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": "24h",
        }
        values |= {"metadata": None if metadata is None else json.dumps(metadata), "output_seconds": output_seconds}
        values |= {"status": "validating", "created_at": now, "expires_at": now + WINDOW_SECONDS}
        with self._database.transaction() as connection:
            file = self.files.select(connection, tenant, input_file_id)
            if file is None or file.purpose != "batch":
                raise UnknownFile
            names, marks = ", ".join(values), ", ".join("?" * len(values))
            connection.execute(f"INSERT INTO batches ({names}) VALUES ({marks})", tuple(values.values()))
        return self.read(id)

    def find(self, tenant: str, id: str) -> StoredBatch | None:
        """The tenant's batch with that id."""
        rows = self._database.query(f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND tenant = ?", id, tenant)
        return _batch(rows[0]) if rows else None

    def page(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[StoredBatch], bool]:
        """At most `limit` of the tenant's batches, the newest first, those older than `after`; and whether there are
        more."""
        sql = f"SELECT {_COLUMNS} FROM batches WHERE tenant = ? AND (? IS NULL OR id < ?) ORDER BY id DESC LIMIT ?"
        rows = self._database.query(sql, tenant, after, after, limit + 1)
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    def cancel(self, tenant: str, id: str) -> StoredBatch | None:
        """Cancels a batch where that is still possible; returns the batch as it is then."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ?"
                " WHERE id = ? AND tenant = ? AND status IN ('validating', 'in_progress')",
                (int(self.now()), id, tenant),
            )
        return self.find(tenant, id)

    # Used by the runner

    def open_batches(self) -> list[StoredBatch]:
        """Those that have not ended, the oldest first."""
        return [_batch(row) for row in self._database.query(f"SELECT {_COLUMNS} FROM batches WHERE status IN {OPEN_STATUSES} ORDER BY id")]

    def read(self, id: str) -> StoredBatch:
        """A batch as it is now."""
        [row] = self._database.query(f"SELECT {_COLUMNS} FROM batches WHERE id = ?", id)
        return _batch(row)

    def validate(self, batch: StoredBatch, max_line_bytes: int, *, is_strict: bool = False) -> StoredBatch:
        """Checks a batch's input file with `check_input`. The batch is then in progress, or has failed; or it was
        cancelled meanwhile."""
        try:
            checked = check_input(self.files.path(batch.input_file_id), batch.endpoint, max_line_bytes, is_strict=is_strict)
        except FileNotFoundError:
            checked = CheckedInput(errors=(LineError("file_not_found", "the input file's contents are gone from the server's folder"),))
        except OSError:
            raise
        except Exception:  # a fault of this program: the file won't be different the next time
            logger.exception("the input file of batch %s can't be checked", batch.id)
            checked = CheckedInput(errors=(LineError("internal_error", "internal error; the server's log has the details"),))
        now = int(self.now())
        with self._database.transaction() as connection:
            if checked.errors:
                is_changed = connection.execute(
                    "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? WHERE id = ? AND status = 'validating'",
                    (now, json.dumps([asdict(error) for error in checked.errors]), batch.id),
                ).rowcount
            else:
                is_changed = self._begin(connection, batch.id, checked, now)
        if is_changed and checked.errors:
            self.files.discard(batch.input_file_id)
        return self.read(batch.id)

    def _begin(self, connection: sqlite3.Connection, id: str, checked: CheckedInput, now: int) -> int:
        is_changed = connection.execute(
            "UPDATE batches SET status = 'in_progress', in_progress_at = ?, num_lines = ?, model = ? WHERE id = ? AND status = 'validating'",
            (now, len(checked.lines), checked.model, id),
        ).rowcount
        if is_changed:
            connection.executemany(
                "INSERT INTO lines (batch_id, number, position, num_bytes) VALUES (?, ?, ?, ?)",
                ((id, line.number, line.position, line.num_bytes) for line in checked.lines),
            )
        return is_changed

    def unanswered(self, batch: StoredBatch, after: int, limit: int = CHUNK) -> list[LinePlace]:
        """The first of a batch's lines after number `after` that have no answer."""
        rows = self._database.query(
            "SELECT number, position, num_bytes FROM lines WHERE batch_id = ? AND number > ? AND answer IS NULL ORDER BY number LIMIT ?",
            *(batch.id, after, limit),
        )
        return [LinePlace(*row) for row in rows]

    def request(self, batch: StoredBatch, place: LinePlace) -> bytes:
        """A line of the input file."""
        with self.files.path(batch.input_file_id).open("rb") as file:
            file.seek(place.position)
            return file.read(place.num_bytes)

    def keep(self, answers: Sequence[Answer]) -> None:
        """Makes answers durable, all in one transaction. An answer is dropped if its line has one, or if its batch is
        no longer in progress."""
        with self._database.transaction() as connection:
            for answer in answers:
                id = answer.batch_id
                is_new = connection.execute(
                    "UPDATE lines SET answer = ?, is_failure = ? WHERE batch_id = ? AND number = ? AND answer IS NULL"
                    " AND EXISTS (SELECT 1 FROM batches WHERE id = batch_id AND status = 'in_progress')",
                    (answer.line, answer.is_failure, id, answer.number),
                ).rowcount
                if is_new:
                    connection.execute(
                        "UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ?, input_tokens = input_tokens + ?,"
                        " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ? WHERE id = ?",
                        (not answer.is_failure, answer.is_failure, answer.input_tokens, answer.cached_tokens, answer.output_tokens, id),
                    )

    def finish(self, id: str) -> StoredBatch:
        """Ends a batch without running lines: writes its output and its error file, in the input's order. Lines without
        an answer get the reason there: the batch was cancelled, or it expired."""
        with self._database.transaction() as connection:  # from here on no answer is accepted, and no cancelling
            connection.execute(
                "UPDATE batches SET status = 'finalizing', finalizing_at = ? WHERE id = ? AND status = 'in_progress'", (int(self.now()), id)
            )
        batch = self.read(id)
        if batch.status not in ("finalizing", "cancelling"):
            return batch  # it has ended already
        num_unanswered = batch.num_lines - batch.num_completed - batch.num_failed
        status = "cancelled" if batch.status == "cancelling" else "expired" if num_unanswered else "completed"
        output = self._write(batch, "output", "is_failure = 0", status) if batch.num_completed else None
        errors = self._write(batch, "error", "is_failure IS NOT 0", status) if batch.num_failed + num_unanswered else None
        with self._database.transaction() as connection:
            for file in filter(None, (output, errors)):
                self.files.insert(connection, file)
            connection.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?, num_failed = num_failed + ? WHERE id = ?",
                (status, int(self.now()), output and output.id, errors and errors.id, num_unanswered, id),
            )
            connection.execute("DELETE FROM lines WHERE batch_id = ?", (id,))
        self.files.discard(batch.input_file_id)
        return self.read(id)

    def _write(self, batch: StoredBatch, kind: str, which: str, status: str) -> StoredFile:
        def write(target: BinaryIO) -> None:
            target.writelines(self._output_lines(batch, which, status))

        return self.files.write(batch.tenant, f"{batch.id}_{kind}.jsonl", "batch_output", write, batch.output_seconds)

    def _output_lines(self, batch: StoredBatch, which: str, status: str) -> Iterator[bytes]:
        sql = f"SELECT number, position, num_bytes, answer FROM lines WHERE batch_id = ? AND {which} AND number > ? ORDER BY number LIMIT ?"
        number = 0
        while rows := self._database.query(sql, batch.id, number, CHUNK):
            for number, position, num_bytes, answer in rows:
                yield answer or self._no_answer(batch, LinePlace(number, position, num_bytes), status)

    def _no_answer(self, batch: StoredBatch, place: LinePlace, status: str) -> bytes:
        custom_id, _ = read_line(self.request(batch, place))
        return encoded(no_answer(answer_id(batch.id, place.number), custom_id, *_UNANSWERED[status]))


def answer_id(batch_id: str, number: int) -> str:
    """The id of a line's answer."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def _batch(row: sqlite3.Row) -> StoredBatch:
    values = dict(row)
    for name in ("metadata", "errors"):
        values[name] = None if values[name] is None else json.loads(values[name])
    return StoredBatch(**values)
