"""From a checkpoint to sharded arrays on devices. Of each tensor only the slices that those devices need are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import jax
import numpy as np

from checkpoints.aligned import aligned_empty
from checkpoints.parameter_filling import ParameterFilling, Shape, fillings, places, runs
from checkpoints.source import Index, TensorSource, bounds
from checkpoints.weight_map import Weight, WeightMap

Within = tuple[tuple[int, int], ...]  # (start, stop) of each dimension

# Enough to overlap reading, dequantising and copying; more would only hold more tensors in memory at once.
_NUM_THREADS = min(4, os.cpu_count() or 1)


def load(
    source: TensorSource,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    weight_map: WeightMap,
    convert: Callable[[str, jax.Array], Any] = lambda path, array: array,
    *,
    is_partial: bool = False,
) -> dict[str, Any]:
    """Every parameter of `targets` (dotted path -> shape, dtype and sharding) from the checkpoint, as an array so
    sharded.

    Floating point values are cast to the target's type. `convert` is called with each array as soon as it is loaded,
    and its result replaces the array: only a few exist in both formats. May be called again on the same source for
    another mesh. Raises `CheckpointError`, before anything is read, for tensors that are missing, of another shape, or,
    if `is_partial` is not set, left over.
    """
    found = _fillings(source, targets, weight_map, is_partial=is_partial)
    # so that no thread has one left at the end
    largest_first = sorted(targets, key=lambda path: -prod(targets[path].shape))
    # `convert` may launch collectives, which all processes must launch in one order: theirs is this process's order
    # with a single thread.
    pool = ThreadPoolExecutor(_NUM_THREADS if jax.process_count() == 1 else 1, "load")
    try:
        arrays = pool.map(lambda path: convert(path, _load_one(source, targets[path], found[path])), largest_first)
        loaded = dict(zip(largest_first, arrays, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
    return {path: loaded[path] for path in targets}


def check(source: TensorSource, targets: Mapping[str, jax.ShapeDtypeStruct], weight_map: WeightMap) -> None:
    """Raises the `CheckpointError` that `load` would before it reads, if any."""
    _fillings(source, targets, weight_map)


def _fillings(
    source: TensorSource, targets: Mapping[str, jax.ShapeDtypeStruct], weight_map: WeightMap, *, is_partial: bool = False
) -> dict[str, ParameterFilling]:
    return fillings(source, {path: tuple(target.shape) for path, target in targets.items()}, weight_map, is_partial=is_partial)


def _load_one(source: TensorSource, target: jax.ShapeDtypeStruct, filling: ParameterFilling) -> jax.Array:
    read: dict[Within, np.ndarray] = {}

    def shard(index: Index | None) -> np.ndarray:
        key = tuple(bounds(index, target.shape))
        if key not in read:  # devices that hold the same shard share one read
            read[key] = _read_shard(source, filling, target.shape, key, target.dtype)
        return read[key]

    return jax.make_array_from_callback(target.shape, target.sharding, shard, dtype=target.dtype)


def _read_shard(source: TensorSource, filling: ParameterFilling, shape: Shape, within: Within, dtype: np.dtype) -> np.ndarray:
    """The values of a parameter of `shape` within these (start, stop) of each dimension."""
    if not filling.is_of_experts:
        return _read_joined(source, filling.weights[0], shape, within, dtype)
    (first, last), *of_one = within
    values = np.empty([stop - start for start, stop in within], dtype)
    for expert in range(first, last):
        values[expert - first] = _read_joined(source, filling.weights[expert], shape[1:], tuple(of_one), dtype)
    return values


def _read_joined(source: TensorSource, weight: Weight, shape: Shape, within: Within, dtype: np.dtype) -> np.ndarray:
    """A weight that fills `shape`: its tensors side by side."""
    if len(weight.tensors) == 1:
        return _read_tensor(source, weight.tensors[0], weight, shape, within).astype(dtype, copy=False)
    axis = weight.axis % len(shape)
    values = aligned_empty([stop - start for start, stop in within], np.dtype(dtype))
    first, last = within[axis]
    for name, place in places(source, weight, shape).items():
        start, stop = max(place.start, first), min(place.start + place.size, last)
        if start < stop:
            of_place = (*within[:axis], (start - place.start, stop - place.start), *within[axis + 1 :])
            to = (*[slice(None)] * axis, slice(start - first, stop - first))
            values[to] = _read_tensor(source, name, weight, place.shape, of_place)
    return values


def _read_tensor(source: TensorSource, name: str, weight: Weight, shape: Shape, within: Within) -> np.ndarray:
    """A tensor's values within these (start, stop) of each dimension of its slot, which has this shape: run by run."""
    of_dims = runs(source, name, weight, shape, within)

    def read(index: Index) -> np.ndarray:
        if len(index) < len(of_dims):
            pieces = [read((*index, slice(*run))) for run in of_dims[len(index)]]
            return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, len(index))
        return source.read(name, index[::-1], weight.part).T if weight.transpose else source.read(name, index, weight.part)

    return read(()).reshape([stop - start for start, stop in within])
