"""From a checkpoint to sharded arrays on devices, reading of each tensor only the slices that those devices need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from checkpoints.source import CheckpointError, Index, TensorSource, bounds
from checkpoints.weight_map import Weight, WeightMap

# Enough to overlap reading, dequantising and copying; more would only hold more tensors in memory at once.
_NUM_THREADS = min(4, os.cpu_count() or 1)


def load(
    source: TensorSource,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    weight_map: WeightMap,
    convert: Callable[[str, jax.Array], Any] = lambda path, array: array,
) -> dict[str, Any]:
    """Every parameter of `targets` (dotted path -> shape, dtype and sharding) from the checkpoint, as an array so sharded.

    Floating point values are cast to the target's type. `convert` is given each array as soon as it is there, and what it returns takes
    its place: no more than a few are held in both forms. May be called again on the same source for another mesh. Raises
    `CheckpointError`, before anything is read, for tensors that are missing, of another shape, or left over.
    """
    check(source, targets, weight_map)
    weights = {path: weight_map.find(path) for path in targets}
    largest_first = sorted(targets, key=lambda path: -prod(targets[path].shape))  # so that no thread is left with one at the end
    pool = ThreadPoolExecutor(_NUM_THREADS, "load")
    try:
        arrays = pool.map(lambda path: convert(path, _load_one(source, targets[path], weights[path])), largest_first)
        loaded = dict(zip(largest_first, arrays, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
    return {path: loaded[path] for path in targets}


def check(source: TensorSource, targets: Mapping[str, jax.ShapeDtypeStruct], weight_map: WeightMap) -> None:
    """Raise the `CheckpointError` that `load` would before it reads, if any."""
    weights = {path: weight_map.find(path) for path in targets}
    names, called_for = set(source.names()), {name for weight in weights.values() for name in weight.tensors}
    if missing := sorted(called_for - names):
        raise CheckpointError(
            f"{source.path}: {_some(missing)} missing, which this model's configuration calls for; fetch or convert the checkpoint again"
        )
    if surplus := sorted(name for name in names - called_for if not weight_map.is_ignored(name)):
        raise CheckpointError(
            f"{source.path}: {_some(surplus)} in the checkpoint but not in a model of this configuration: "
            "check that config.json belongs to these weights and that the architecture is supported"
        )
    for path, weight in weights.items():
        target = tuple(targets[path].shape)
        parts = _parts(source, weight, target)
        fit = all(_groups(_oriented(source.shape(name), weight), part.shape) is not None for name, part in parts.items())
        if not fit or sum(part.size for part in parts.values()) != target[weight.axis % len(target)]:
            shapes = " and ".join(f"tensor {name!r} has shape {list(source.shape(name))}" for name in weight.tensors)
            raise CheckpointError(
                f"{source.path}: {shapes}, but the configuration calls for {list(target)}{' side by side' if len(parts) > 1 else ''}"
                f"{' transposed' if weight.transpose else ''} (parameter {path!r}): check that the configuration belongs to these weights"
            )


def _some(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:3])
    return f"tensor {listed} is" if len(names) == 1 else f"tensors {listed}{f' and {len(names) - 3} more' if len(names) > 3 else ''} are"


def _load_one(source: TensorSource, target: jax.ShapeDtypeStruct, weight: Weight) -> jax.Array:
    read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def shard(index: Index | None) -> np.ndarray:
        key = tuple(bounds(index, target.shape))
        if key not in read:  # devices that hold the same shard share one read
            read[key] = _read_shard(source, weight, target.shape, key, target.dtype)
        return read[key]

    return jax.make_array_from_callback(target.shape, target.sharding, shard, dtype=target.dtype)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor's part of a parameter: `size` places along the weight's axis from `start` on."""

    shape: tuple[int, ...]
    start: int
    size: int


def _parts(source: TensorSource, weight: Weight, shape: tuple[int, ...]) -> dict[str, _Part]:
    """Of each tensor of a parameter of `shape`, in order."""
    axis = weight.axis % len(shape)
    parts, start = {}, 0
    for name in weight.tensors:
        size = prod(source.shape(name)) * shape[axis] // prod(shape) if len(weight.tensors) > 1 else shape[axis]
        parts[name] = _Part((*shape[:axis], size, *shape[axis + 1 :]), start, size)
        start += size
    return parts


def _read_shard(
    source: TensorSource, weight: Weight, shape: tuple[int, ...], within: tuple[tuple[int, int], ...], dtype: np.dtype
) -> np.ndarray:
    """The values of a parameter of `shape` within these (start, stop) of each dimension."""
    if len(weight.tensors) == 1:
        return _read_tensor(source, weight.tensors[0], weight, shape, within).astype(dtype, copy=False)
    axis = weight.axis % len(shape)
    values = np.empty([stop - start for start, stop in within], dtype)
    first, last = within[axis]
    for name, part in _parts(source, weight, shape).items():
        start, stop = max(part.start, first), min(part.start + part.size, last)
        if start < stop:
            of_part = (*within[:axis], (start - part.start, stop - part.start), *within[axis + 1 :])
            place = (*[slice(None)] * axis, slice(start - first, stop - first))
            values[place] = _read_tensor(source, name, weight, part.shape, of_part)
    return values


def _read_tensor(
    source: TensorSource, name: str, weight: Weight, shape: tuple[int, ...], within: tuple[tuple[int, int], ...]
) -> np.ndarray:
    """A tensor's values within these (start, stop) of each dimension of its part, which has this shape."""
    groups = _groups(_oriented(source.shape(name), weight), shape)
    assert groups is not None
    # Along each of the tensor's dimensions, read from the first to the last place of the outermost of the part's dimensions that it is
    # split into (those of size 1 aside); the inner ones are cut after.
    ranges, read_shape, cut, at = [], [], [], 0
    for dims in groups:
        outer = next((i for i, size in enumerate(dims) if size > 1), 0)
        (start, stop), inner = within[at + outer], prod(dims[outer + 1 :])
        ranges.append(slice(start * inner, stop * inner))
        read_shape += [*dims[:outer], stop - start, *dims[outer + 1 :]]
        cut += [*[slice(None)] * (outer + 1), *(slice(*r) for r in within[at + outer + 1 : at + len(dims)])]
        at += len(dims)
    values = source.read(name, tuple(reversed(ranges)) if weight.transpose else tuple(ranges))
    return (values.T if weight.transpose else values).reshape(read_shape)[tuple(cut)]


def _oriented(shape: tuple[int, ...], weight: Weight) -> tuple[int, ...]:
    return tuple(reversed(shape)) if weight.transpose else tuple(shape)


def _groups(tensor: tuple[int, ...], param: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The runs of `param`'s dimensions that make up each of `tensor`'s: (576, 192) and (576, 3, 64) -> [(576,), (3, 64)].

    None where they don't: the shapes differ by more than a split.
    """
    groups, at = [], 0
    for number, size in enumerate(tensor):
        end = len(param) if number == len(tensor) - 1 else at + 1
        while end < len(param) and prod(param[at:end]) < size:
            end += 1
        if at >= len(param) or prod(param[at:end]) != size:
            return None
        groups.append(tuple(param[at:end]))
        at = end
    return groups if at == len(param) else None
