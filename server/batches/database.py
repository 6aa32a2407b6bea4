"""SQLite, opened by one process at a time: every transaction is on the disk when it returns."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jaxinfer.config import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
Clock = Callable[[], float]  # Unix seconds

VERSION = 1
_SCHEMA = (
    """CREATE TABLE files (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
        num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
    )""",
    """CREATE TABLE batches (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
        completion_window TEXT NOT NULL, metadata TEXT, output_seconds INTEGER, status TEXT NOT NULL,
        created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER,
        failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
        errors TEXT, model TEXT, output_file_id TEXT, error_file_id TEXT,
        num_lines INTEGER NOT NULL DEFAULT 0, num_completed INTEGER NOT NULL DEFAULT 0, num_failed INTEGER NOT NULL DEFAULT 0,
        input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE INDEX batches_by_status ON batches (status)",
    # Lines of batches in progress. `position` and `num_bytes` locate a line in the input file; a line without an answer
    # is still to be processed.
    """CREATE TABLE lines (
        batch_id TEXT NOT NULL REFERENCES batches (id), number INTEGER NOT NULL, position INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
        answer BLOB, is_failure INTEGER, PRIMARY KEY (batch_id, number)
    )""",
)


class Database:
    """Every table of /v1/files and /v1/batches. May be used from any thread; one transaction runs at a time."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises `ConfigError` for one that another process has open or that is something
        else."""
        self._mutex = threading.Lock()
        self._last_stamp = 0
        try:
            self.connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigError(f"batch_dir is {path.parent}: {error}; give a folder that can be written to") from error
        self.connection.row_factory = sqlite3.Row
        try:
            # The lock is the operating system's: it ends with the process, however that ends.
            self.connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")  # survives a power cut too, not only the process
            self._make_tables(path)
        except ConfigError:
            self.connection.close()
            raise
        except sqlite3.DatabaseError as error:
            self.connection.close()
            if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ConfigError(f"{path} is in use by another process: end that server, or give each its own --batch-dir") from error
            raise ConfigError(f"{path} can't be used ({error}): give another --batch-dir") from error

    def _make_tables(self, path: Path) -> None:
        with self.transaction() as connection:
            [version] = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise ConfigError(f"{path} is of version {version}, this program's is {VERSION}: give another --batch-dir")
            for statement in _SCHEMA if version == 0 else ():
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")  # writes in any case, which acquires the lock

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything done within is durable once this is left, or nothing of it."""
        with self._mutex:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # a full disk ends it by itself
                    self.connection.execute("ROLLBACK")
                raise

    def query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """The rows that a SELECT finds."""
        with self._mutex:
            return self.connection.execute(sql, values).fetchall()

    def new_id(self, prefix: str) -> str:
        """Such as 'file-0f...'. Ids sort by the time at which they were created, so that a list can continue after a
        deleted one."""
        with self._mutex:
            self._last_stamp = max(self._last_stamp + 1, time.time_ns())
            return f"{prefix}{self._last_stamp:016x}{secrets.token_hex(6)}"

    def close(self) -> None:
        """Closes the file."""
        with self._mutex:
            self.connection.close()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs what waits for the disk in a thread, outside of the event loop. A thread can't be cancelled: a cancelled
    caller waits for its end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def sync_folder(folder: Path) -> None:
    """Makes durable which names a folder contains."""
    if hasattr(os, "O_DIRECTORY"):  # Windows keeps names itself
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
