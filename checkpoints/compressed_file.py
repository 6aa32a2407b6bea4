"""One compressed safetensors file: what it holds, written and read in chunks. See docs/checkpoints.md for the layout.

It is a safetensors file itself. Each tensor of the plain file is one of bytes under the same name: chunks of
`CHUNK_BYTES` of its values, coded one by one. `.header` has the plain file's first bytes as they were, `.chunks` has
for each chunk its coded length and the XXH3 of its plain bytes. A chunk that would not get shorter is stored as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash

from checkpoints.aligned import aligned_empty
from checkpoints.exponent_coding import ExponentCoder
from checkpoints.safetensors_file import FileTensor, SafetensorsFile
from checkpoints.source import CheckpointError, Ranges

FORMAT = "jaxinfer lossless"
VERSION = "1"
CHUNK_BYTES = 1 << 22
_HEADER, _CHUNKS = ".header", ".chunks"
_CODED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a value; others are coded byte by byte
_DAMAGED = "fetch or compress it again"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor's bytes before and after."""

    name: str
    type: str
    plain: int
    coded: int


class _Coders(threading.local):
    """A coder of each size for each thread."""

    def __init__(self) -> None:
        self._of: dict[int, ExponentCoder] = {}

    def of(self, type: str) -> ExponentCoder:
        size = _CODED_BYTES.get(type, 1)
        return self._of.setdefault(size, ExponentCoder(size))


_CODERS = _Coders()


def _encode(plain: np.ndarray, type: str) -> tuple[np.ndarray, tuple[bytes, ...], int]:
    planes, frame = _CODERS.of(type).encode(plain)
    is_shorter = len(planes) + len(frame) < len(plain)
    return plain, (planes, frame) if is_shorter else (plain.tobytes(),), xxhash.xxh3_64_intdigest(plain.data)


def compress_file(plain: Path, coded: Path, threads: ThreadPoolExecutor, advance: Callable[[int], None]) -> list[TensorBytes]:
    """Writes a plain safetensors file's compressed form. At most some chunks are in memory. `advance` is called with
    the plain bytes done. Raises `CheckpointError` and `OSError`."""
    source = SafetensorsFile(plain)
    if FORMAT in source.metadata.get("format", ""):
        raise CheckpointError(f"{plain}: is compressed already")
    tensors = sorted(source.tensors.items(), key=lambda item: item[1].offset)
    if {_HEADER, _CHUNKS} & source.tensors.keys():
        raise CheckpointError(f"{plain}: has a tensor named {_HEADER!r} or {_CHUNKS!r}, which compressed files have for themselves")
    start = tensors[0][1].offset if tensors else source.data.size
    first = source.data[:start].tobytes()
    digest = hashlib.sha256(first)
    sizes = {_HEADER: len(first)} | {name: 0 for name, _ in tensors} | {_CHUNKS: 0}
    room = len(_header_text(dict.fromkeys(sizes, 10**15), "0" * 64))
    records, done = bytearray(), []
    with coded.open("wb") as out, plain.open("rb") as file:
        out.seek(8 + room)
        out.write(first)
        for (name, tensor), chunks in _by_tensor(tensors, file, threads):
            for bytes_of_chunk, parts, checksum in chunks:
                digest.update(bytes_of_chunk.data)
                length = sum(out.write(part) for part in parts)
                records += length.to_bytes(8, "little") + checksum.to_bytes(8, "little")
                sizes[name] += length
                advance(bytes_of_chunk.nbytes)
            done.append(TensorBytes(name, tensor.type, tensor.num_bytes, sizes[name]))
        sizes[_CHUNKS] = out.write(records)
        text = _header_text(sizes, digest.hexdigest())
        out.seek(0)
        out.write(room.to_bytes(8, "little") + text + b" " * (room - len(text)))
        out.flush()
        os.fsync(out.fileno())
    return done


Encoded = Iterator[tuple[np.ndarray, tuple[bytes, ...], int]]


def _by_tensor(
    tensors: list[tuple[str, FileTensor]], file: BinaryIO, threads: ThreadPoolExecutor
) -> Iterator[tuple[tuple[str, FileTensor], Encoded]]:
    """Each tensor with its chunks. Those of the next tensors are encoded meanwhile."""

    def read_and_encode(at: int, length: int, type: str) -> tuple[np.ndarray, tuple[bytes, ...], int]:
        read = os.pread(file.fileno(), length, at)
        if len(read) != length:
            raise CheckpointError(f"{file.name}: became shorter while it was read")
        return _encode(np.frombuffer(read, np.uint8), type)

    tasks = (
        (read_and_encode, (tensor.offset + at, length, tensor.type)) for _, tensor in tensors for at, length in _chunks(tensor.num_bytes)
    )
    results = in_order(threads, tasks)
    for each in tensors:
        yield each, (next(results) for _ in _chunks(each[1].num_bytes))


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each."""
    return ((at, min(CHUNK_BYTES, num_bytes - at)) for at in range(0, num_bytes, CHUNK_BYTES))


def in_order(threads: ThreadPoolExecutor, tasks: Iterable[tuple[Callable[..., T], tuple[Any, ...]]]) -> Iterator[T]:
    """The tasks' results in order, with two a processor waiting or running: memory is bounded."""
    running: deque[Future[T]] = deque()
    try:
        for function, arguments in tasks:
            running.append(threads.submit(function, *arguments))
            if len(running) > 2 * (os.cpu_count() or 1):
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for task in running:
            task.cancel()


def _header_text(sizes: dict[str, int], sha256: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": f"{FORMAT} {VERSION}", "sha256": sha256, "chunk_bytes": str(CHUNK_BYTES)}}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    return json.dumps(header, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class CompressedTensor(FileTensor):
    """Read like a plain file's. `offset` is that of its first coded byte."""

    name: str
    lengths: np.ndarray  # of its coded chunks, uint64
    checksums: np.ndarray  # of its plain ones, uint64

    def chunk(self, number: int, starts: np.ndarray) -> np.ndarray:
        """A chunk's plain bytes. `starts`: where each coded one begins. Raises `CheckpointError` if it is damaged."""
        coded = self.file.read(int(starts[number]), int(starts[number + 1] - starts[number]))
        plain = np.empty(min(CHUNK_BYTES, self.num_bytes - number * CHUNK_BYTES), np.uint8)
        try:
            if len(coded) == len(plain):
                plain[:] = coded
            else:
                _CODERS.of(self.type).decode(coded.data, plain)
        except ValueError as error:
            raise self._damaged() from error
        if xxhash.xxh3_64_intdigest(plain.data) != self.checksums[number]:
            raise self._damaged()
        return plain

    def starts(self) -> np.ndarray:
        return self.offset + np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def read(self, ranges: Ranges) -> np.ndarray:
        """What these (start, stop) of each dimension select. Chunks that have none of these rows are not decoded."""
        if not self.shape:
            return np.array(self._bytes(0, self.num_bytes).view(self.dtype).reshape(()))
        (first, last), *others = ranges
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        rows = self._bytes(first * row_bytes, max(first, last) * row_bytes).view(self.dtype).reshape(-1, *self.shape[1:])
        return np.array(rows[(slice(None), *(slice(*r) for r in others))])

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        found, starts = aligned_empty((stop - start,), np.dtype(np.uint8)), self.starts()
        for number in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            at = number * CHUNK_BYTES
            plain = self.chunk(number, starts)
            found[max(at - start, 0) : at + len(plain) - start] = plain[max(start - at, 0) : stop - at]
        return found

    def _damaged(self) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: tensor {self.name!r} is damaged; {_DAMAGED}")


class CompressedFile:
    """Its tensors, by the names that they have in the plain file. Raises `CheckpointError` for a file that is damaged,
    or of a version that this one doesn't know."""

    def __init__(self, file: SafetensorsFile) -> None:
        self.path, self.sha256 = file.path, file.metadata.get("sha256", "")
        if file.metadata["format"] != f"{FORMAT} {VERSION}" or file.metadata.get("chunk_bytes") != str(CHUNK_BYTES):
            raise CheckpointError(f"{file.path}: is {file.metadata['format']!r}, which this version can't read: {FORMAT} {VERSION} it can")
        try:
            self.first = _whole(file, _HEADER)
            records = np.frombuffer(_whole(file, _CHUNKS), "<u8").reshape(-1, 2)
            header = json.loads(self.first[8:])
            self.tensors = dict(self._tensors(file, header, records))
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file.path}: damaged: {error}; {_DAMAGED}") from error

    def _tensors(self, file: SafetensorsFile, header: dict[str, Any], records: np.ndarray) -> Iterator[tuple[str, CompressedTensor]]:
        plain = {name: about for name, about in header.items() if name != "__metadata__"}
        if plain.keys() != file.tensors.keys() - {_HEADER, _CHUNKS}:
            raise ValueError("it holds other tensors than its header says")
        at = 0
        for name, about in sorted(plain.items(), key=lambda item: item[1]["data_offsets"]):
            coded, (start, stop) = file.tensors[name], about["data_offsets"]
            number = -(-(stop - start) // CHUNK_BYTES)
            lengths, checksums = records[at : at + number].T
            tensor = CompressedTensor(file, about["dtype"], tuple(about["shape"]), coded.offset, name, lengths, checksums)
            if len(lengths) != number or int(lengths.sum()) != coded.num_bytes or tensor.num_bytes != stop - start:
                raise ValueError(f"tensor {name!r} has other sizes than its header says")
            at += number
            yield name, tensor

    @property
    def num_bytes(self) -> int:
        """Of the plain file."""
        return len(self.first) + sum(tensor.num_bytes for tensor in self.tensors.values())


def _whole(file: SafetensorsFile, name: str) -> bytes:
    tensor = file.tensors[name]
    return tensor.read([(0, tensor.shape[0])]).tobytes()


def open_file(path: Path) -> SafetensorsFile | CompressedFile:
    """A plain or a compressed file. Raises `CheckpointError`."""
    file = SafetensorsFile(path)
    return CompressedFile(file) if file.metadata.get("format", "").startswith(FORMAT) else file


def decompress_file(coded: CompressedFile, plain: Path, threads: ThreadPoolExecutor, advance: Callable[[int], None]) -> None:
    """Writes the plain file, byte for byte. Raises `CheckpointError`, which names the tensor that is damaged, and
    `OSError`."""
    tensors = list(coded.tensors.values())
    digest = hashlib.sha256(coded.first)
    tasks = (
        (tensor.chunk, (number, starts)) for tensor in tensors for starts in [tensor.starts()] for number in range(len(tensor.lengths))
    )
    with plain.open("wb") as out:
        out.write(coded.first)
        for chunk in in_order(threads, tasks):
            digest.update(chunk.data)
            out.write(chunk.data)
            advance(chunk.nbytes)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != coded.sha256:
        raise CheckpointError(f"{coded.path}: its plain bytes have another checksum than its header says; {_DAMAGED}")
