"""DiskFile: KV pages in one file that outlives the process. Nothing in it is used before its checksum matches. Imports
no JAX.

    header | table of 32 entries | 32 pages | table | 32 pages | ...

An entry describes the page in its slot: key, fingerprint of the model, checksum. Tables lie among the pages, so that a
file can be opened with another size, and reading all tables is a small part of reading the file. No write waits for
the disk: what a kill or a power cut leaves incomplete fails its checksum. The file is sparse: a slot takes space when
it is first written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from jaxinfer.config import ConfigError, format_bytes

MAGIC = b"jaxinfer KV file"
VERSION = 1  # of the file format
MAX_KEY_SIZE = 32
ALIGNMENT = 4096  # bytes of the header and of a table; pages are padded to a multiple
ENTRY_SIZE = 128
TABLE_ENTRIES = ALIGNMENT // ENTRY_SIZE

_HEADER = struct.Struct("<16sIQ")  # magic, version, page_bytes; then their checksum
# Key size, key, fingerprint, sequence, the page's checksum; then the entry's checksum.
_ENTRY = struct.Struct(f"<B{MAX_KEY_SIZE}s32sQI")
_CHECKSUM = struct.Struct("<I")


class DiskFileError(ConfigError):
    """A file that can't be used for KV pages; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page that an entry describes."""

    key: bytes
    slot: int
    sequence: int  # grows with every write
    checksum: int


class DiskFile:
    """One file of at most `size` bytes, locked for this process while it is open. `stored`: usable pages that an
    earlier run left, oldest first. `refused`: counts of unusable ones by reason."""

    def __init__(self, path: str, size: int, page_bytes: int, fingerprint: bytes) -> None:
        """`fingerprint`: all that a page's meaning depends on (model, weights, layout, type); pages of another are
        refused. A file of another version or page size starts empty. Raises `DiskFileError` if the path can't be
        used, or is a file of another kind."""
        self._page_bytes = page_bytes
        self._stride = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        self._fingerprint = sha256(fingerprint).digest()
        self.num_slots = self._slots_in(size)
        if not self.num_slots:
            least = format_bytes(2 * ALIGNMENT + self._stride)
            raise DiskFileError(f"kv_disk of {format_bytes(size)} holds no page of {format_bytes(page_bytes)}: give at least {least}")
        self.refused: Counter[str] = Counter()
        with contextlib.ExitStack() as on_error:
            self._file = _open_alone(path)
            on_error.callback(os.close, self._file)
            try:
                self._start(path)
                self.stored = self._read_tables()
            except OSError as error:
                raise DiskFileError(f"kv_disk: {path} can't be used: {error.strerror}; free some room or give another path") from error
            on_error.pop_all()
        self._sequence = max((page.sequence for page in self.stored), default=0)

    def write(self, slot: int, key: bytes, page: np.ndarray) -> int:
        """Store a page of `page_bytes` bytes; returns its checksum. After an `OSError` the slot has no readable
        page."""
        assert len(key) <= MAX_KEY_SIZE, key
        self._sequence += 1
        checksum = zlib.crc32(page.data)
        entry = _ENTRY.pack(len(key), key, self._fingerprint, self._sequence, checksum)
        self._write_at(self._page_at(slot), page.data)
        self._write_at(self._entry_at(slot), memoryview(_sealed(entry)))
        return checksum

    def read(self, slot: int, checksum: int, out: np.ndarray) -> bool:
        """Fill `out`, a row of `page_bytes` bytes. False if the bytes don't match the checksum: then `out` must not be
        used. Raises `OSError`."""
        view, position = out.data, self._page_at(slot)
        while view:
            count = os.preadv(self._file, [view], position)
            if not count:
                return False
            view, position = view[count:], position + count
        return zlib.crc32(out.data) == checksum

    def close(self) -> None:
        """Unlock the file for other processes."""
        os.close(self._file)

    def _start(self, path: str) -> None:
        """Make sure that the file begins with our header and ends within its size. Never changes a file of another
        kind."""
        head = os.pread(self._file, _HEADER.size + _CHECKSUM.size, 0)
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            raise DiskFileError(f"kv_disk: {path} is not a file of KV pages: give another path, or delete it if nobody needs it")
        header = _sealed(_HEADER.pack(MAGIC, VERSION, self._page_bytes))
        if head != header:
            if head:
                self.refused[_mismatch(head)] += 1
            os.ftruncate(self._file, 0)
            self._write_at(0, memoryview(header))
            os.fsync(self._file)  # else a power cut could leave zeros, which are not our header
        end = self._page_at(self.num_slots - 1) + self._page_bytes
        if os.fstat(self._file).st_size > end:
            os.ftruncate(self._file, end)
            num_cut = -self.num_slots % TABLE_ENTRIES  # entries of the last table whose pages were cut off
            self._write_at(self._entry_at(self.num_slots - 1) + ENTRY_SIZE, memoryview(bytes(num_cut * ENTRY_SIZE)))

    def _read_tables(self) -> list[StoredPage]:
        size = os.fstat(self._file).st_size
        newest: dict[bytes, StoredPage] = {}
        for first in range(0, self.num_slots, TABLE_ENTRIES):
            if self._entry_at(first) >= size:
                break
            try:
                table = os.pread(self._file, ALIGNMENT, self._entry_at(first)).ljust(ALIGNMENT, b"\0")
            except OSError:
                self.refused["unreadable"] += TABLE_ENTRIES
                continue
            for page in self._read_table(table, first, size):
                if page.key not in newest or newest[page.key].sequence < page.sequence:
                    newest[page.key] = page
        return sorted(newest.values(), key=lambda page: page.sequence)

    def _read_table(self, table: bytes, first: int, size: int) -> Iterator[StoredPage]:
        for slot in range(first, min(first + TABLE_ENTRIES, self.num_slots)):
            raw = table[(slot - first) * ENTRY_SIZE :][: _ENTRY.size + _CHECKSUM.size]
            if not any(raw):
                continue  # never written
            entry = raw[: _ENTRY.size]
            key_size, key, fingerprint, sequence, checksum = _ENTRY.unpack(entry)
            if raw != _sealed(entry) or self._page_at(slot) + self._page_bytes > size:
                self.refused["torn"] += 1
            elif fingerprint != self._fingerprint:
                self.refused["other model"] += 1
            else:
                yield StoredPage(key[:key_size], slot, sequence, checksum)

    def _slots_in(self, size: int) -> int:
        groups, rest = divmod(size - ALIGNMENT, ALIGNMENT + TABLE_ENTRIES * self._stride)
        return max(0, groups * TABLE_ENTRIES + max(0, (rest - ALIGNMENT) // self._stride)) if size > ALIGNMENT else 0

    def _entry_at(self, slot: int) -> int:
        group, index = divmod(slot, TABLE_ENTRIES)
        return ALIGNMENT + group * (ALIGNMENT + TABLE_ENTRIES * self._stride) + index * ENTRY_SIZE

    def _page_at(self, slot: int) -> int:
        group, index = divmod(slot, TABLE_ENTRIES)
        return self._entry_at(group * TABLE_ENTRIES) + ALIGNMENT + index * self._stride

    def _write_at(self, position: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._file, data, position)
            data, position = data[count:], position + count


def _open_alone(path: str) -> int:
    """A descriptor of the file, created if missing, locked against other processes."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # pages reveal what users wrote
    except OSError as error:
        raise DiskFileError(f"kv_disk: can't open {path}: {error.strerror}; give a file in a folder that can be written to") from error
    with contextlib.ExitStack() as on_error:
        on_error.callback(os.close, file)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DiskFileError(f"kv_disk: {path} is not a regular file: give another path")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DiskFileError(f"kv_disk: {path} is in use by another engine: give each its own file") from error
        except OSError as error:
            raise DiskFileError(f"kv_disk: {path} can't be locked: {error.strerror}; give a path on a local disk") from error
        on_error.pop_all()
    return file


def _sealed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(zlib.crc32(data))


def _mismatch(head: bytes) -> str:
    """Why a file with our magic has another header."""
    if len(head) < _HEADER.size:
        return "torn"
    _, version, _ = _HEADER.unpack(head[: _HEADER.size])
    if version != VERSION:  # checked first: another version's checksum may lie elsewhere
        return "other version"
    return "torn" if head != _sealed(head[: _HEADER.size]) else "other layout"
