"""The GGUF container: metadata and tensor directory, read from a memory map.

The `gguf` package's own reader makes a NumPy view of every vocabulary entry, two seconds for a 49k vocabulary. This one
reads the strings directly in some 50 ms. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints.model_path import FETCH_AGAIN, check_magic
from checkpoints.source import CheckpointError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # outermost dimension first, as in NumPy (GGUF stores the reverse)
    type: GGMLQuantizationType
    offset: int  # of the first byte, from the start of the file
    num_bytes: int


class GGUFFile:
    """A GGUF file's `metadata` (key -> value; arrays of numbers as NumPy arrays) and `tensors`, and its bytes in
    `data`.

    Raises `CheckpointError` for a file that is missing, truncated, corrupt or of a kind not supported: nothing is
    half-read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise CheckpointError(f"{path}: can't be read ({error}); check the path, or {FETCH_AGAIN}") from error
        try:
            self.metadata, self.tensors = _GGUFParser(path, self.data).parse()
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise CheckpointError(f"{path}: truncated or corrupt GGUF header ({error}); {FETCH_AGAIN}") from error
        for name, tensor in self.tensors.items():
            if tensor.offset + tensor.num_bytes > len(self.data):
                raise CheckpointError(
                    f"{path}: truncated: tensor {name!r} ends at byte {tensor.offset + tensor.num_bytes:,} and the file at "
                    f"{len(self.data):,}; {FETCH_AGAIN}"
                )


class _GGUFParser:
    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.buffer = data.data  # a memoryview
        self.at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        check_magic(self.path, bytes(self.buffer[:4]))
        self.at = 4
        version, num_tensors, num_values = self._scalar("<I"), self._scalar("<Q"), self._scalar("<Q")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version}: 2 and 3 (little endian) are supported; convert the file again")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"), key)
        tensors = dict(self._tensor_info() for _ in range(num_tensors))
        if len(tensors) != num_tensors:
            raise CheckpointError(f"{self.path}: a tensor name occurs twice in the GGUF directory; {FETCH_AGAIN}")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error(f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        return metadata, {n: TensorInfo(t.shape, t.type, start + t.offset, t.num_bytes) for n, t in tensors.items()}

    def _scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self.buffer, self.at)
        self.at += struct.calcsize(format)
        return value

    def _take(self, count: int) -> memoryview:
        if count > len(self.buffer) - self.at:
            raise struct.error(f"{count:,} bytes wanted at byte {self.at:,} of {len(self.buffer):,}")
        self.at += count
        return self.buffer[self.at - count : self.at]

    def _string(self) -> str:
        return str(self._take(self._scalar("<Q")), "utf-8")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise struct.error(f"value type {kind} of {key!r} is not a GGUF type")
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise struct.error(f"array type {kind} of {key!r} is not supported")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).copy()

    def _strings(self, count: int) -> list[str]:
        # The inner loop of start-up: a hundred thousand strings.
        unpack, buffer, at, strings = struct.Struct("<Q").unpack_from, self.buffer, self.at, []
        for _ in range(count):
            (length,) = unpack(buffer, at)
            if length > len(buffer) - at - 8:
                raise struct.error(f"a string of {length:,} bytes at byte {at:,} of {len(buffer):,}")
            strings.append(str(buffer[at + 8 : at + 8 + length], "utf-8"))
            at += 8 + length
        self.at = at
        return strings

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        name, num_dims = self._string(), self._scalar("<I")
        if num_dims > 4:
            raise struct.error(f"tensor {name!r} of {num_dims} dimensions")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(num_dims)]))
        number, offset = self._scalar("<I"), self._scalar("<Q")
        try:
            type_ = GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has unknown type {number}; convert the file to F16, Q8_0 or Q4_K"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if not shape or shape[-1] % block:
            raise struct.error(f"tensor {name!r} of shape {shape} is not whole {type_.name} blocks of {block}")
        return name, TensorInfo(shape, type_, offset, prod(shape) // block * block_bytes)
