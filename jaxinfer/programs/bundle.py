"""Bundles: all compiled programs of an engine's start in a folder that can be shipped, sealed with a key.

Executables are code, so every file is checked before one is used. What they were compiled for is written beside them:
where that differs here, programs are not found and are compiled anew, and the difference is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.programs.private_folder import PrivateFolder
from jaxinfer.programs.sealing import seal, unseal

_MANIFEST = "manifest.sealed"
_LEAST_KEY = 32  # bytes


class BundleError(ValueError):
    """A bundle that can't be used; the message names the file and what to do."""


@dataclass(frozen=True)
class Bundle:
    """`about`: what its programs were compiled for, by name. `contents`: by the names of the program cache's files."""

    about: Mapping[str, str]
    contents: Mapping[str, bytes]

    def differences(self, here: Mapping[str, str]) -> list[str]:
        """What they were compiled for that isn't so here."""
        return [
            f"{name} is {here.get(name, 'not set')}, they were compiled for {self.about.get(name, 'none')}"
            for name in sorted({*self.about, *here})
            if self.about.get(name) != here.get(name)
        ]

    def install(self, into: PrivateFolder) -> None:
        """Put all programs where a start looks for them, but for those that are there. Raises `OSError`."""
        known = set(into.names())
        for name, content in self.contents.items():
            if name not in known:
                into.write(name, content)


def write_bundle(programs: PrivateFolder, folder: Path, key: bytes, about: Mapping[str, str]) -> Bundle:
    """Write what a program cache has. Raises `BundleError` for a folder that holds anything, `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BundleError(f"{folder} is not empty: give a folder to be made")
    contents = {name: content for name in sorted(programs.names()) if (content := programs.read(name)) is not None}
    for name, content in contents.items():
        (folder / name).write_bytes(seal(key, name, content))
    manifest = {"about": dict(about), "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}}
    # The last: without it nothing counts.
    (folder / _MANIFEST).write_bytes(seal(key, _MANIFEST, json.dumps(manifest).encode()))
    return Bundle(about, contents)


def read_bundle(folder: Path, key: bytes) -> Bundle:
    """Every file, checked. Raises `BundleError` for one that is missing, was changed, or is another bundle's."""
    manifest = json.loads(_read(folder, _MANIFEST, key))
    contents = {}
    for name, digest in manifest["files"].items():
        contents[name] = _read(folder, name, key)
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise BundleError(f"{folder / name} is another bundle's: compile the programs again")
    return Bundle(manifest["about"], contents)


def read_bundle_key(path: Path) -> bytes:
    """A key from a file of at least 32 bytes. Raises `BundleError`, `OSError`."""
    content = path.read_bytes()
    if len(content) < _LEAST_KEY:
        raise BundleError(f"{path} has {len(content)} bytes: a key has at least {_LEAST_KEY}, such as `openssl rand 32` gives")
    return hashlib.sha256(content).digest()


def _read(folder: Path, name: str, key: bytes) -> bytes:
    if Path(name).name != name:
        raise BundleError(f"{folder}: its manifest names {name!r}, which is no file beside it")
    try:
        content = unseal(key, name, (folder / name).read_bytes())
    except FileNotFoundError:
        raise BundleError(f"{folder / name} is missing: give a folder that `jaxinfer compile` wrote, whole") from None
    except ValueError:
        raise BundleError(f"{folder / name} was changed, or sealed with another key: nothing of {folder} is used") from None
    if content is None:
        raise BundleError(f"{folder / name} is of an earlier format: compile the programs again")
    return content
