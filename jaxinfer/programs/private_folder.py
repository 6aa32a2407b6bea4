"""Files that only this user may write, each sealed (HMAC) with this user's key: what is read is what was written.
Imports no JAX.

A file is opened first and checked then, so that what was checked is what is read. The key lies outside the folder,
since several users may share a folder of compiled programs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.programs.sealing import seal, unseal

_LOG = logging.getLogger(__name__)

_KEY_SIZE = 32
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_UNUSED_SECONDS = 30 * 24 * 3600.0


class UnsafeFileError(OSError):
    """A file or folder that another user could have written; the message says whose it is and what to do."""


@dataclass(frozen=True)
class PrivateFolder:
    path: Path
    key: bytes

    @classmethod
    def at(cls, path: Path, key_path: Path) -> PrivateFolder:
        """The folder, made if needed (mode 0700), without the files that nobody read for a month. Makes the key if
        there is none. Raises `UnsafeFileError` for a folder that others can write to, `OSError` for one that can't be
        used."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        made = cls(path, read_key(key_path))
        with made._open() as folder:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):  # another process may have deleted it, or own it
                    if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > _MOST_UNUSED_SECONDS:
                        os.unlink(name, dir_fd=folder)
        return made

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is no file of this format. Raises `UnsafeFileError` if another user could
        have written it, `ValueError` if it does not match its seal, `OSError`."""
        with self._open() as folder:
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            with open(file, "rb") as opened:
                _check(opened.fileno(), self.path / name)
                sealed = opened.read()
                with contextlib.suppress(OSError):
                    os.utime(opened.fileno())
        return unseal(self.key, name, sealed)

    def names(self) -> list[str]:
        """All files."""
        with self._open() as folder:
            return os.listdir(folder)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file as a whole. Raises `OSError`."""
        sealed = seal(self.key, name, content)
        unfinished = f"{name}.{os.getpid()}.{threading.get_ident()}"
        with self._open() as folder:
            try:
                with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder), "wb") as file:
                    file.write(sealed)
                os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mode = _check(folder, self.path)
            if mode & 0o077:
                os.fchmod(folder, 0o700)
            yield folder
        finally:
            os.close(folder)


def read_key(path: Path) -> bytes:
    """This user's key; a new one if there is none or others could have read it. Raises `OSError`."""
    for _ in range(2):
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                status, key = os.fstat(file.fileno()), file.read(_KEY_SIZE + 1)
            if status.st_uid == os.geteuid() and not status.st_mode & 0o077 and len(key) == _KEY_SIZE:
                return key
            _LOG.warning("%s could be known to others, or is no key: a new one is made, and what was sealed with it is made anew", path)
            path.unlink()
        except FileNotFoundError:
            pass
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_SIZE))
            with contextlib.suppress(FileExistsError):  # another process was first: its key stays
                os.link(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    raise UnsafeFileError(f"{path} is not this user's own file: delete it, or set XDG_CACHE_HOME to a folder of this user's")


def check_folder(path: Path) -> None:
    """Raises `UnsafeFileError` for a folder that another user could write to, `OSError`."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(folder, path)
    finally:
        os.close(folder)


def _check(file: int, path: Path) -> int:
    """The mode of an open file or folder. Raises `UnsafeFileError` if another user could have written it."""
    status, user = os.fstat(file), os.geteuid()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise UnsafeFileError(f"{path} is no regular file: delete it")
    if status.st_uid != user:
        raise UnsafeFileError(f"{path} belongs to user {status.st_uid}, not to {user}, who runs this: delete it, or chown it to {user}")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise UnsafeFileError(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}): delete it, or chmod go-w it")
    return status.st_mode
