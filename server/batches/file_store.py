"""Uploaded and written files: a row of the database each, and their contents under the same name in a folder."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from server.batches.database import Clock, Database, sync_folder

# A file's contents stay while a batch still reads them, even if the file itself is deleted or has expired.
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
_IS_READ = f"EXISTS (SELECT 1 FROM batches WHERE input_file_id = ? AND status IN {OPEN_STATUSES})"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A row of the table `files`; times are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None


_COLUMNS = ", ".join(field.name for field in fields(StoredFile))


class FileStore:
    """Contents are written before the row that names them and removed after it, so that a row's contents are always
    whole. Contents without a row, which a killed process may leave, are removed when the folder is opened again."""

    def __init__(self, database: Database, folder: Path, now: Clock) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._database, self._folder, self._now = database, folder, now
        for name in os.listdir(folder):
            if not self._is_needed(name):
                (folder / name).unlink()

    def add(self, tenant: str, filename: str, source: BinaryIO, seconds: int | None) -> StoredFile:
        """Stores an uploaded file for `seconds` seconds from now on; None: until it is deleted."""
        file = self.write(tenant, filename, "batch", lambda target: shutil.copyfileobj(source, target, 1 << 20), seconds)
        try:
            with self._database.transaction() as connection:
                self.insert(connection, file)
        except BaseException:
            self.discard(file.id)
            raise
        return file

    def write(self, tenant: str, filename: str, purpose: str, write: Callable[[BinaryIO], object], seconds: int | None) -> StoredFile:
        """Writes a file's contents, whole and durable; its row is still to be inserted."""
        id, now = self._database.new_id("file-"), int(self._now())
        unfinished = self._folder / f"{id}.part"
        try:
            with unfinished.open("wb") as target:
                write(target)
                target.flush()
                os.fsync(target.fileno())
                num_bytes = target.tell()
            unfinished.replace(self.path(id))
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)
        return StoredFile(id, tenant, filename, purpose, num_bytes, now, None if seconds is None else now + seconds)

    def insert(self, connection: sqlite3.Connection, file: StoredFile) -> None:
        """Within a transaction: from its end on the file exists."""
        connection.execute(f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(file))

    def find(self, tenant: str, id: str) -> StoredFile | None:
        """The tenant's file with that id, unless it has expired."""
        with self._database.transaction() as connection:
            return self.select(connection, tenant, id)

    def select(self, connection: sqlite3.Connection, tenant: str, id: str) -> StoredFile | None:
        """`find` within a transaction."""
        sql = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND {self._is_alive()}"
        row = connection.execute(sql, (id, tenant)).fetchone()
        return None if row is None else StoredFile(*row)

    def page(self, tenant: str, *, after: str | None, limit: int, ascending: bool, purpose: str | None) -> tuple[list[StoredFile], bool]:
        """At most `limit` of the tenant's files, by time, those after the id `after`; and whether there are more."""
        compare, order = (">", "ASC") if ascending else ("<", "DESC")
        rows = self._database.query(
            f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND (? IS NULL OR id {compare} ?) AND (? IS NULL OR purpose = ?)"
            f" AND {self._is_alive()} ORDER BY id {order} LIMIT ?",
            *(tenant, after, after, purpose, purpose, limit + 1),
        )
        return [StoredFile(*row) for row in rows[:limit]], len(rows) > limit

    def delete(self, tenant: str, id: str) -> bool:
        """Deletes a file; returns whether it existed."""
        with self._database.transaction() as connection:
            sql = f"DELETE FROM files WHERE id = ? AND tenant = ? AND {self._is_alive()}"
            is_found = connection.execute(sql, (id, tenant)).rowcount == 1
        if is_found:
            self.discard(id)
        return is_found

    def remove_expired(self) -> None:
        """Deletes the files that have expired."""
        expired = [row["id"] for row in self._database.query(f"SELECT id FROM files WHERE NOT {self._is_alive()}")]
        for id in expired:
            with self._database.transaction() as connection:
                connection.execute("DELETE FROM files WHERE id = ?", (id,))
            self.discard(id)

    def discard(self, id: str) -> None:
        """Removes a file's contents, unless its row or an unfinished batch needs them."""
        if not self._is_needed(id):
            self.path(id).unlink(missing_ok=True)

    def path(self, id: str) -> Path:
        """The path of a file's contents."""
        return self._folder / id

    def _is_needed(self, id: str) -> bool:
        return bool(self._database.query(f"SELECT 1 WHERE EXISTS (SELECT 1 FROM files WHERE id = ?) OR {_IS_READ}", id, id))

    def _is_alive(self) -> str:
        return f"(expires_at IS NULL OR expires_at > {int(self._now())})"
