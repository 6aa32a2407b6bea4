"""A folder of safetensors compressed without loss, and back, byte for byte. Each file is written beside the others and
takes its name when it is whole, so that a command that was interrupted goes on with the next one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.compressed_file import FORMAT, VERSION, CompressedFile, TensorBytes, compress_file, decompress_file, open_file
from checkpoints.destination import check_destination, check_space, put_in_place
from checkpoints.json_file import read_json
from checkpoints.source import CheckpointError

MANIFEST = "compression.json"
_STATE, _LOCK = ".state.json", ".lock"
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CompressionResult:
    """Bytes of the safetensors files, and of each tensor that was done now, not by an earlier run."""

    plain: int
    coded: int
    tensors: tuple[TensorBytes, ...] = ()


def plain_bytes(source: Path) -> int:
    """Bytes of the safetensors files as they are, or once they are decompressed. Raises `CheckpointError`."""
    if (source / MANIFEST).exists():
        return sum(about["bytes"] for about in _manifest(source).values())
    return sum(file.stat().st_size for file in _weight_files(source))


def compress(source: Path, destination: Path, *, is_forced: bool = False, advance: Advance = lambda num_bytes: None) -> CompressionResult:
    """Writes a folder with the source's safetensors compressed, a manifest, and all other files as they are. `advance`
    is called with the plain bytes done. Raises `CheckpointError` and `OSError`."""
    if (source / MANIFEST).exists():
        raise CheckpointError(f"{source}: is compressed already")
    files = _weight_files(source)
    manifest: dict[str, dict[str, Any]] = {}
    tensors: list[TensorBytes] = []
    with _part_of(source, destination, files, is_forced) as part, ThreadPoolExecutor(os.cpu_count()) as threads:
        for file in files:
            done = part / file.name
            if done.exists():
                advance(file.stat().st_size)
            else:
                unfinished = done.with_name(f".{file.name}")
                tensors += compress_file(file, unfinished, threads, advance)
                unfinished.rename(done)
            coded = open_file(done)
            assert isinstance(coded, CompressedFile)
            manifest[file.name] = {"bytes": file.stat().st_size, "sha256": coded.sha256, "coded_bytes": done.stat().st_size}
        _copy_others(source, part, files)
        text = json.dumps({"format": FORMAT, "version": VERSION, "files": manifest}, indent=2) + "\n"
        (part / MANIFEST).write_text(text, encoding="utf-8")
        _finish(part, destination)
    return _result(manifest, tensors)


def decompress(source: Path, destination: Path, *, is_forced: bool = False, advance: Advance = lambda num_bytes: None) -> CompressionResult:
    """Writes the folder that was compressed. Raises `CheckpointError` for damaged files, which names the tensor, and
    for a manifest of other files; `OSError`."""
    manifest = _manifest(source)
    coded_files = {name: _coded(source / name, about) for name, about in manifest.items()}
    check_space(_made(destination), sum(about["bytes"] for about in manifest.values()))
    with (
        _part_of(source, destination, [file.path for file in coded_files.values()], is_forced) as part,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):
        for name, coded in coded_files.items():
            if (part / name).exists():
                advance(manifest[name]["bytes"])
                continue
            unfinished = part / f".{name}"
            decompress_file(coded, unfinished, threads, advance)
            unfinished.rename(part / name)
        _copy_others(source, part, [*(file.path for file in coded_files.values()), source / MANIFEST])
        _finish(part, destination)
    return _result(manifest)


def _result(manifest: dict[str, dict[str, Any]], tensors: Sequence[TensorBytes] = ()) -> CompressionResult:
    plain, coded = (sum(about[key] for about in manifest.values()) for key in ("bytes", "coded_bytes"))
    return CompressionResult(plain, coded, tuple(tensors))


def _weight_files(source: Path) -> list[Path]:
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not files:
        raise CheckpointError(f"{source}: has no safetensors files: give a folder of them, or `jaxinfer convert` it to one first")
    return files


def _manifest(source: Path) -> dict[str, dict[str, Any]]:
    file = source / MANIFEST
    if not file.exists():
        raise CheckpointError(f"{source}: has no {MANIFEST}: it is not compressed")
    manifest = read_json(file)
    files = manifest.get("files")
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{file}: is of {manifest.get('format')!r} {manifest.get('version')!r}: {FORMAT} {VERSION} can be read")
    sound = isinstance(files, dict) and all(
        Path(name).name == name and isinstance(about, dict) and isinstance(about.get("bytes"), int) and "coded_bytes" in about
        for name, about in files.items()
    )
    if not sound or not files:
        raise CheckpointError(f"{file}: has no list of files; fetch it again")
    assert isinstance(files, dict)
    return files


def _coded(path: Path, about: dict[str, Any]) -> CompressedFile:
    file = open_file(path)
    if not isinstance(file, CompressedFile):
        raise CheckpointError(f"{path}: is not compressed, though {MANIFEST} says so")
    if (file.sha256, file.num_bytes) != (about.get("sha256"), about["bytes"]):
        raise CheckpointError(f"{path}: is not the file that {MANIFEST} is of; fetch both again")
    return file


@contextmanager
def _part_of(source: Path, destination: Path, files: list[Path], is_forced: bool) -> Iterator[Path]:
    """The folder that is written to until it is finished. It stays when the command is interrupted, and the next one of
    the same source goes on there."""
    check_destination(destination, is_forced)
    destination, source = destination.resolve(), source.resolve()
    if destination == source or destination in source.parents:
        raise CheckpointError(f"{destination}: is where the source lies: give another folder")
    part = _made(destination).with_name(f".{destination.name}.part")
    part.mkdir(exist_ok=True)
    state = {"source": str(source), "files": {file.name: [(about := file.stat()).st_size, about.st_mtime_ns] for file in files}}
    with (part / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{destination}: another process writes to it") from None
        if not (part / _STATE).exists() or read_json(part / _STATE) != state:
            for file in part.iterdir():
                if file.name != _LOCK:
                    shutil.rmtree(file) if file.is_dir() else file.unlink()
            (part / _STATE).write_text(json.dumps(state), encoding="utf-8")
        try:
            yield part
        except CheckpointError:  # the source is damaged: nothing here is of use
            shutil.rmtree(part, ignore_errors=True)
            raise


def _made(destination: Path) -> Path:
    """With the folder that it is in."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    return destination


def _copy_others(source: Path, part: Path, files: list[Path]) -> None:
    names = {file.name for file in files}
    for path in sorted(source.rglob("*")):
        place = path.relative_to(source)
        if path.is_file() and str(place) not in names:
            (part / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part / place)


def _finish(part: Path, destination: Path) -> None:
    for name in (_STATE, _LOCK):
        (part / name).unlink()
    put_in_place(part, destination.resolve())
