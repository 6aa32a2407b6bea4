"""Compiled programs kept on disk: a start that finds its programs traces, lowers and compiles nothing.

A program is found by its origin, all that it follows from, without being traced. Where that is new, as after an update that leaves the
program as it was, it is traced and found by its text. JAX's own cache knows only the latter, and what XLA for CPUs has loaded from
there can't be serialized again, so that a program is kept here or there, not in both.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from pallas_kernels.llvm.machine import code_named_in, register_code

_LOG = logging.getLogger(__name__)
_MOST_UNUSED_SECONDS = 30 * 24 * 3600.0


class _Origin(NamedTuple):
    """What a start that doesn't trace a program has to know of it."""

    text_key: str  # by which its executable is kept
    in_tree: Any
    out_tree: Any
    custom_calls: dict[str, bytes]  # object files by name


@dataclass(frozen=True)
class ProgramCache:
    """A folder of programs. Nothing that is wrong with it stops a start: what can't be read is compiled. As with JAX's own cache, whoever
    can write there can run code here."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> ProgramCache | None:
        """The folder's, made if need be and without what no start has asked for in a month; None where there can be none."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _LOG.warning("compiled programs can't be kept in %s: %s", folder, error)
            return None
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # another process may have deleted it, or own it
                if time.time() - path.stat().st_mtime > _MOST_UNUSED_SECONDS:
                    path.unlink()
        return cls(folder)

    def by_origin(self, origin: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """The program of this origin on these devices; None if it isn't there."""
        found = self._read(f"{_key(origin)}.origin")
        if found is None:
            return None
        known = _Origin(*found)
        for name, code in known.custom_calls.items():
            register_code(name, code)
        return self._load(known, devices)

    def by_text(self, origin: str, text: str, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """The program that was lowered to this text. From now on it is found by this origin too."""
        known = _about(text, lowered)
        program = self._load(known, devices)
        if program is not None:
            self._write(f"{_key(origin)}.origin", tuple(known))
        return program

    def keep(self, origin: str, text: str, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> None:
        """Have a program found by either."""
        try:
            executable = serialize(compiled)[0]
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            _LOG.info("a program that can't be kept: %s", error)
            return
        known = _about(text, lowered)
        self._write(f"{known.text_key}.executable", executable)
        self._write(f"{_key(origin)}.origin", tuple(known))

    def _load(self, known: _Origin, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        name = f"{known.text_key}.executable"
        executable = self._read(name)
        if executable is None:
            return None
        try:
            return deserialize_and_load(executable, known.in_tree, known.out_tree, devices[0].client, devices)
        except Exception as error:
            self._report(name, error)
            return None

    def _read(self, name: str) -> Any:
        path = self.folder / name
        try:
            packed = path.read_bytes()
            with contextlib.suppress(OSError):  # it may be another's
                os.utime(path)
            return pickle.loads(zlib.decompress(packed))
        except FileNotFoundError:
            return None
        except Exception as error:
            self._report(name, error)
            return None

    def _write(self, name: str, value: Any) -> None:
        unfinished = self.folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            unfinished.write_bytes(zlib.compress(pickle.dumps(value), 1))
            unfinished.replace(self.folder / name)
        except Exception as error:
            _LOG.warning("%s can't be written, the next start will compile it: %s", self.folder / name, error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _report(self, name: str, error: Exception) -> None:
        _LOG.warning("%s can't be read and is compiled anew: %s: %s", self.folder / name, type(error).__name__, error)


def _about(text: str, lowered: jax.stages.Lowered) -> _Origin:
    return _Origin(_key(text), jax.tree.structure(lowered.args_info), lowered.out_tree, code_named_in(text))


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]
