"""From a checkpoint to sharded arrays on devices, reading of each tensor only the slices that those devices need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod

import jax
import numpy as np

from checkpoints.source import CheckpointError, Index, TensorSource, bounds
from checkpoints.weight_map import Weight, WeightMap

# Enough to overlap reading, dequantising and copying; more would only hold more tensors in memory at once.
_NUM_THREADS = min(4, os.cpu_count() or 1)


def load(source: TensorSource, targets: Mapping[str, jax.ShapeDtypeStruct], weight_map: WeightMap) -> dict[str, jax.Array]:
    """Every parameter of `targets` (dotted path -> shape, dtype and sharding) from the checkpoint, as an array so sharded.

    Floating point values are cast to the target's type. May be called again on the same source for another mesh. Raises
    `CheckpointError`, before anything is read, for tensors that are missing, of another shape, or left over.
    """
    weights = {path: weight_map.find(path) for path in targets}
    _check(source, targets, weights, weight_map)
    largest_first = sorted(targets, key=lambda path: -prod(targets[path].shape))  # so that no thread is left with one at the end
    pool = ThreadPoolExecutor(_NUM_THREADS, "load")
    try:
        arrays = pool.map(lambda path: _load_one(source, targets[path], weights[path]), largest_first)
        loaded = dict(zip(largest_first, arrays, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
    return {path: loaded[path] for path in targets}


def _check(source: TensorSource, targets: Mapping[str, jax.ShapeDtypeStruct], weights: Mapping[str, Weight], weight_map: WeightMap) -> None:
    names = set(source.names())
    if missing := sorted(weight.tensor for weight in weights.values() if weight.tensor not in names):
        raise CheckpointError(
            f"{source.path}: {_some(missing)} missing, which this model's configuration calls for; fetch or convert the checkpoint again"
        )
    if surplus := sorted(name for name in names - {weight.tensor for weight in weights.values()} if not weight_map.is_ignored(name)):
        raise CheckpointError(
            f"{source.path}: {_some(surplus)} in the checkpoint but not in a model of this configuration: "
            "check that config.json belongs to these weights and that the architecture is supported"
        )
    for path, weight in weights.items():
        shape, target = source.shape(weight.tensor), tuple(targets[path].shape)
        if _groups(_oriented(shape, weight), target) is None:
            raise CheckpointError(
                f"{source.path}: tensor {weight.tensor!r} has shape {list(shape)}, but the configuration calls for "
                f"{list(target)}{' transposed' if weight.transpose else ''} (parameter {path!r}): check that the configuration belongs to these weights"
            )


def _some(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:3])
    return f"tensor {listed} is" if len(names) == 1 else f"tensors {listed}{f' and {len(names) - 3} more' if len(names) > 3 else ''} are"


def _load_one(source: TensorSource, target: jax.ShapeDtypeStruct, weight: Weight) -> jax.Array:
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: Index | None) -> np.ndarray:
        key = tuple(bounds(index, target.shape))
        if key not in parts:  # devices that hold the same part share one read
            parts[key] = _read_part(source, weight, target.shape, key).astype(target.dtype, copy=False)
        return parts[key]

    return jax.make_array_from_callback(target.shape, target.sharding, part, dtype=target.dtype)


def _read_part(source: TensorSource, weight: Weight, shape: tuple[int, ...], part: tuple[tuple[int, int], ...]) -> np.ndarray:
    """The values of a parameter of `shape` within `part`, the (start, stop) of each dimension."""
    groups = _groups(_oriented(source.shape(weight.tensor), weight), shape)
    assert groups is not None
    # Along each of the tensor's dimensions, read from the leading parameter dimension's first to its last; the others are cut after.
    ranges, read_shape, cut, at = [], [], [], 0
    for dims in groups:
        (start, stop), inner = part[at], prod(dims[1:])
        ranges.append(slice(start * inner, stop * inner))
        read_shape += [stop - start, *dims[1:]]
        cut += [slice(None), *(slice(*r) for r in part[at + 1 : at + len(dims)])]
        at += len(dims)
    values = source.read(weight.tensor, tuple(reversed(ranges)) if weight.transpose else tuple(ranges))
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
