"""Global memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

_ALIGNMENT = 256  # bytes: where arrays begin, and the least that lies between them


@dataclass(frozen=True)
class LastOf:
    """An array as the last part of a larger one, along an axis. Of the rest there is nothing, and no one may touch it."""

    values: np.ndarray
    axis: int
    length: int  # of that axis in the larger one

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the larger one."""
        return (*self.values.shape[: self.axis], self.length, *self.values.shape[self.axis + 1 :])

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype


AnyArray: TypeAlias = np.ndarray | LastOf


@dataclass
class Memory:
    """Arrays one after the other, with gaps that no one may touch. Addresses are those of whole arrays; only what there is of them is kept."""

    data: np.ndarray  # bytes
    starts: list[int]  # addresses, of each array
    places: list[int]  # in `data`, of each array
    item_sizes: list[int]
    runs: np.ndarray  # [3, X], by address: where bytes that there are begin, where they end, and their place in `data`

    @classmethod
    def of(cls, arrays: Sequence[AnyArray]) -> Memory:
        """An array that comes twice is there once."""
        each = {id(array): array for array in arrays}
        starts, places, runs = {}, {}, []
        address, place = _ALIGNMENT, 0
        for key, array in each.items():
            starts[key], places[key] = address, place
            for begin, size in _parts(array):
                runs.append((address + begin, address + begin + size, place))
                place += size
            address = -(-runs[-1][1] // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        data = np.concatenate([np.ascontiguousarray(_values(array)).reshape(-1).view(np.uint8) for array in each.values()])
        keys = [id(array) for array in arrays]
        item_sizes = [_values(array).itemsize for array in arrays]
        return cls(data, [starts[key] for key in keys], [places[key] for key in keys], item_sizes, np.array(runs, np.int64).T)

    def write_back(self, arrays: Sequence[AnyArray]) -> None:
        for place, array in zip(self.places, map(_values, arrays), strict=True):
            array[...] = self.data[place : place + array.nbytes].view(array.dtype).reshape(array.shape)

    def at(self, addresses: np.ndarray, size: int = 1) -> np.ndarray:
        """Places in `data` of so many bytes from each address on. Raises `IndexError` where they are no array's, or what there isn't of one."""
        begins, ends, places = self.runs
        which = np.searchsorted(begins, addresses, side="right") - 1
        if ((which < 0) | (addresses + size > ends[which])).any():
            raise IndexError(f"global memory from {addresses.min()} to {addresses.max() + size} is no array's")
        return addresses - begins[which] + places[which]


def _values(array: AnyArray) -> np.ndarray:
    return array.values if isinstance(array, LastOf) else array


def _parts(array: AnyArray) -> Iterator[tuple[int, int]]:
    """Where what there is of an array begins in it, and how long it is, in bytes."""
    values = _values(array)
    if not isinstance(array, LastOf):
        yield 0, values.nbytes
        return
    num_parts = math.prod(values.shape[: array.axis])
    size = values.nbytes // num_parts
    whole = size // values.shape[array.axis] * array.length
    for i in range(num_parts):
        yield (i + 1) * whole - size, size
