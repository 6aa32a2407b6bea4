"""Compiled programs cached on disk: a start that finds its programs traces, lowers and compiles nothing.

A program is looked up by its origin, a digest of all it depends on, without being traced. If the origin is new (after
an update of the code, say), the program is traced and looked up by its text. JAX's own cache has only the second step.
An executable that XLA for CPUs loaded from JAX's cache can't be serialized again, so a program is in one cache only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental.serialize_executable import serialize

from jaxinfer.programs.private_folder import PrivateFolder
from jaxinfer.programs.serialization import Origin, decode_origin, encode_origin, load_executable
from pallas_kernels.llvm.host import object_code_for, register_code

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class ProgramCache:
    """Compiled programs in a folder that only this user can write. No fault of the folder stops a start: what can't be
    read, or could have been written by someone else, is compiled."""

    files: PrivateFolder

    @classmethod
    def at(cls, folder: Path, key_path: Path) -> ProgramCache | None:
        """The cache in a folder, made if needed; entries unused for a month are deleted. None if it can't be used."""
        try:
            return cls(PrivateFolder.at(folder, key_path))
        except OSError as error:
            _LOG.warning("compiled programs aren't cached in %s: %s", folder, error)
            return None

    def by_origin(self, origin: str, arguments: Sequence[Any], devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """The program of this origin, for these arguments and devices; None if it isn't cached."""
        known = self._read(f"{_key(origin)}.origin", decode_origin)
        return None if known is None else self._load(known, arguments, devices)

    def by_text(
        self, origin: str, text: str, lowered: jax.stages.Lowered, arguments: Sequence[Any], devices: Sequence[jax.Device]
    ) -> jax.stages.Compiled | None:
        """The program with this lowered text; None if it isn't cached. It is then found by this origin too."""
        known = _about(text, lowered)
        program = self._load(known, arguments, devices)
        if program is not None:
            self._write(f"{_key(origin)}.origin", lambda: encode_origin(known))
        return program

    def keep(self, origin: str, text: str, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> None:
        """Store a program under its origin and its text."""
        known = _about(text, lowered)
        try:
            executable, about = serialize(compiled)[0], encode_origin(known)
        except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            _LOG.info("a program can't be cached: %s", error)
            return
        self._write(f"{known.text_key}.executable", lambda: executable)
        self._write(f"{_key(origin)}.origin", lambda: about)

    def _load(self, known: Origin, arguments: Sequence[Any], devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        def load(data: bytes) -> jax.stages.Compiled:
            for name, code in known.custom_calls.items():
                register_code(name, code)
            return load_executable(data, arguments, known.out_tree, devices)

        return self._read(f"{known.text_key}.executable", load)

    def _read(self, name: str, decode: Callable[[bytes], T]) -> T | None:
        try:
            data = self.files.read(name)
            return None if data is None else decode(data)
        except Exception as error:
            _LOG.warning("%s can't be used, so its program is compiled again: %s: %s", self.files.path / name, type(error).__name__, error)
            return None

    def _write(self, name: str, encode: Callable[[], bytes]) -> None:
        try:
            self.files.write(name, encode())
        except Exception as error:
            _LOG.warning("%s can't be written, the next start will compile it: %s", self.files.path / name, error)


class JaxCache(CacheInterface):
    """JAX's own compilation cache (`jax_compilation_cache_dir`), kept in the same sealed folder: JAX itself would load
    any file that it finds. `cache` None: caches nothing."""

    def __init__(self, cache: ProgramCache | None) -> None:
        self._cache = cache
        self._path = cache.files.path if cache else Path()

    def get(self, key: str) -> bytes | None:
        return None if self._cache is None else self._cache._read(f"{_key(key)}.jax", bytes)

    def put(self, key: str, value: bytes) -> None:
        if self._cache is not None:
            self._cache._write(f"{_key(key)}.jax", lambda: value)


def _about(text: str, lowered: jax.stages.Lowered) -> Origin:
    return Origin(_key(text), lowered.out_tree, object_code_for(text))


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]
