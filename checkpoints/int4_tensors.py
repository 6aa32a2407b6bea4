"""Matrices of 4-bit integers in groups, as compressed-tensors, GPTQ and AWQ store them: their values, and their blocks.

A value is (code - zero) * scale. A group of a row's inputs shares zero and scale. GPTQ may give each input a group of
its own choice (`g_idx`: "act-order"). Of words of 32 bits the lowest four come first, in AWQ's order for AWQ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from checkpoints.safetensors_file import FileTensor
from checkpoints.source import INT4_GROUPS, CheckpointError, Ranges, StoredArray

Read = Callable[[FileTensor, Ranges], np.ndarray]

PER_WORD = 8
SMALLEST_GROUP = 32
_MIDDLE = 8  # the code of 0 where no zeros are stored
_IN_ORDER = tuple(range(PER_WORD))
_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word a value has its bits


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """Names of the stored parts, and which axis of a matrix [in, out] or [out, in] lies in words."""

    method: str
    codes: str
    scales: str
    zeros: str
    indices: str | None
    is_outputs_first: bool
    packs_inputs: bool
    order: tuple[int, ...] = _IN_ORDER


LAYOUTS = {
    "compressed-tensors": Int4Layout(
        "compressed-tensors", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", True, True
    ),
    "gptq": Int4Layout("gptq", "qweight", "scales", "qzeros", "g_idx", False, True),
    "awq": Int4Layout("awq", "qweight", "scales", "qzeros", None, False, False, _OF_AWQ),
}


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """`parts` by their last words. `group`: inputs that share a scale. `zero_added`: see `Quantisation`. Values are of
    the scales' type: a product is rounded as it was during training or tuning."""

    layout: Int4Layout
    parts: Mapping[str, FileTensor]
    shape: tuple[int, int]  # [out, in]
    group: int
    zero_added: int = 0

    @property
    def format(self) -> str:
        if (
            self.layout.method == "compressed-tensors"
            and self.group == SMALLEST_GROUP
            and set(self.parts)
            == {
                "weight_packed",
                "weight_scale",
                "weight_shape",
            }
        ):
            return INT4_GROUPS
        name = {"gptq": "GPTQ", "awq": "AWQ"}.get(self.layout.method, "INT4")
        return f"{name} {self.group}{' act-order' if self._indices is not None else ''}"

    @property
    def blocks(self) -> tuple[str, StoredArray] | None:
        """The type of blocks that it can be read in, and their array; see `block_values`."""
        scale, (rows, columns) = self.parts[self.layout.scales].type, self.shape
        if self._indices is not None or self.group not in (32, 64, 128) or columns % self.group or scale not in ("F16", "BF16"):
            return None
        if self._zeros is None:
            name, size, num_bytes = "INT4", SMALLEST_GROUP, 2 + SMALLEST_GROUP // 2
        else:
            name, size, num_bytes = f"INT4 zero {self.group}", self.group, 3 + self.group // 2
        return f"{name} {scale}", StoredArray((rows, columns // size, num_bytes), np.dtype(np.uint8))

    def values(self, name: str, read: Read, ranges: Ranges) -> np.ndarray:
        """See `StoredTensor`."""
        rows, columns = ranges
        groups = self._groups_of(name, read, columns)
        first, last = (int(groups.min()), int(groups.max()) + 1) if len(groups) else (0, 0)
        scales = self._scales(read, rows, (first, last))
        values = self._codes(read, rows, columns).astype(np.float32)
        values -= self._zero_codes(read, rows, (first, last))[:, groups - first]
        values *= scales.astype(np.float32)[:, groups - first]
        return values.astype(scales.dtype)

    def block_values(self, read: Read, ranges: Ranges) -> np.ndarray:
        """Of the array `blocks`: a scale (two bytes), a zero where there are zeros, then the lower and upper four bits
        of values 0 to 15 and 16 to 31, for each 32."""
        found = self.blocks
        assert found is not None
        rows, (first, last), within = ranges
        size = self.shape[1] // found[1].shape[1]
        columns = first * size, last * size
        groups = columns[0] // self.group, -(-columns[1] // self.group)
        each = np.arange(first, last) * size // self.group - groups[0]
        codes = self._codes(read, rows, columns).reshape(rows[1] - rows[0], last - first, size // 32, 2, 16)
        parts = [self._scales(read, rows, groups)[:, each].copy()[..., None].view(np.uint8)]
        if self._zeros is not None:
            parts.append(self._zero_codes(read, rows, groups)[:, each, None])
        parts.append((codes[..., 0, :] | codes[..., 1, :] << 4).reshape(*codes.shape[:2], -1))
        return np.concatenate(parts, axis=-1)[..., slice(*within)]

    @property
    def _zeros(self) -> FileTensor | None:
        return self.parts.get(self.layout.zeros)

    @property
    def _indices(self) -> FileTensor | None:
        return None if self.layout.indices is None else self.parts.get(self.layout.indices)

    def _groups_of(self, name: str, read: Read, columns: tuple[int, int]) -> np.ndarray:
        if self._indices is None:
            return np.arange(*columns) // self.group
        groups = read(self._indices, [columns]).astype(np.int64)
        num_groups = self._num_groups
        if groups.size and not (groups.min() >= 0 and groups.max() < num_groups):
            raise CheckpointError(f"{self._indices.file.path}: tensor {name!r} has inputs of groups that aren't there: {num_groups} are")
        return groups

    @property
    def _num_groups(self) -> int:
        return self.parts[self.layout.scales].shape[1 if self.layout.is_outputs_first else 0]

    def _codes(self, read: Read, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        """uint8 [rows, columns]."""
        packed = self.parts[self.layout.codes]
        if self.layout.packs_inputs:
            words = read(packed, self._oriented(rows, _cover(columns)))
            return _unpacked(self._turned(words), _IN_ORDER)[:, columns[0] % PER_WORD :][:, : columns[1] - columns[0]]
        words = read(packed, self._oriented(_cover(rows), columns))
        codes = _unpacked(np.ascontiguousarray(words), self.layout.order).T
        return codes[rows[0] % PER_WORD :][: rows[1] - rows[0]]

    def _scales(self, read: Read, rows: tuple[int, int], groups: tuple[int, int]) -> np.ndarray:
        return self._turned(read(self.parts[self.layout.scales], self._oriented(rows, groups)))

    def _zero_codes(self, read: Read, rows: tuple[int, int], groups: tuple[int, int]) -> np.ndarray:
        """uint8 [rows, groups]. They lie in words along the outputs."""
        if self._zeros is None:
            return np.full((rows[1] - rows[0], groups[1] - groups[0]), _MIDDLE, np.uint8)
        words = read(self._zeros, self._oriented(_cover(rows), groups))
        words = words.T if self.layout.is_outputs_first else words  # [groups, words]
        zeros = _unpacked(np.ascontiguousarray(words), self.layout.order).T[rows[0] % PER_WORD :][: rows[1] - rows[0]]
        return zeros + np.uint8(self.zero_added) & np.uint8(15)

    def _oriented(self, rows: tuple[int, int], columns: tuple[int, int]) -> Ranges:
        return [rows, columns] if self.layout.is_outputs_first else [columns, rows]

    def _turned(self, array: np.ndarray) -> np.ndarray:
        """[out, in] of what is stored."""
        return np.ascontiguousarray(array if self.layout.is_outputs_first else array.T)


def _cover(within: tuple[int, int]) -> tuple[int, int]:
    """The words that hold (start, stop)."""
    start, stop = within
    return start // PER_WORD, -(-stop // PER_WORD) if stop > start else start // PER_WORD


def _unpacked(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """uint8 [rows, 8 for each word]."""
    stored = words.astype("<i4", copy=False).view(np.uint8)
    codes = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*words.shape, PER_WORD)
    return codes[..., list(order)].reshape(len(words), words.shape[-1] * PER_WORD)
