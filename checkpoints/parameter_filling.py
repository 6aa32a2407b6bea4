"""Which tensors of a checkpoint fill which slices of a model's parameters, checked before any is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from checkpoints.source import CheckpointError, Ranges, TensorSource
from checkpoints.weight_map import Weight, WeightMap

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterFilling:
    """The tensors that fill a parameter, by their names in the checkpoint: for the whole, or for each expert's part
    along its first axis."""

    weights: tuple[Weight, ...]
    is_of_experts: bool


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A tensor's part of a parameter: `size` elements along the weight's axis from `start` on."""

    shape: Shape
    start: int
    size: int


def fillings(
    source: TensorSource, shapes: Mapping[str, Shape], weight_map: WeightMap, *, is_partial: bool = False
) -> dict[str, ParameterFilling]:
    """The filling of each parameter (dotted path -> shape). Raises `CheckpointError` for tensors that are missing, of
    another shape, or, if `is_partial` is not set, left over."""
    checkpoint = source.names()
    names = weight_map.names_in(checkpoint)
    found, missing, called_for = {}, set(), set()
    for path, shape in shapes.items():
        weight = weight_map.find(path)
        weights = [weight.of_expert(expert, len(shape)) for expert in range(shape[0])] if weight.is_of_experts else [weight]
        ours = {name for one in weights for name in one.tensors}
        missing |= {name for name in ours if name not in names}
        called_for |= ours
        theirs = (replace(one, tensors=tuple(names.get(name, name) for name in one.tensors)) for one in weights)
        found[path] = ParameterFilling(tuple(theirs), weight.is_of_experts)
    if missing:
        raise CheckpointError(
            f"{source.path}: {_some(weight_map.names_of_missing(missing, checkpoint))} missing, which this model's "
            "configuration calls for; fetch or convert the checkpoint again"
        )
    if not is_partial and (
        surplus := [theirs for ours, theirs in names.items() if ours not in called_for and not weight_map.is_ignored(ours)]
    ):
        raise CheckpointError(
            f"{source.path}: {_some(surplus)} in the checkpoint but not in a model of this configuration: "
            "check that config.json belongs to these weights and that the architecture is supported"
        )
    for path, filling in found.items():
        for weight in filling.weights:
            _check_shapes(source, path, weight, shapes[path][1:] if filling.is_of_experts else shapes[path])
    return found


def places(source: TensorSource, weight: Weight, shape: Shape) -> dict[str, ParameterSlice]:
    """The slice of each tensor of a parameter of `shape`, in order."""
    axis = weight.axis % len(shape)
    found, start = {}, 0
    for name in weight.tensors:
        size = prod(_shape(source, name, weight)) * shape[axis] // prod(shape) if len(weight.tensors) > 1 else shape[axis]
        found[name] = ParameterSlice((*shape[:axis], size, *shape[axis + 1 :]), start, size)
        start += size
    return found


def runs(source: TensorSource, name: str, weight: Weight, shape: Shape, within: tuple[tuple[int, int], ...]) -> list[Ranges]:
    """The runs of indices, along each of a tensor's dimensions (reversed where the weight is), that hold what these
    (start, stop) select of its slice, which has this shape."""
    groups = _groups(_orient(source, name, weight), shape)
    assert groups is not None
    found, at = [], 0
    for dims in groups:
        found.append(_runs_of_one(dims, within[at : at + len(dims)]))
        at += len(dims)
    return found


def _runs_of_one(dims: Shape, within: tuple[tuple[int, int], ...]) -> Ranges:
    """The runs of a dimension that is split into `dims`: one run where they cut none but the outermost."""
    (start, stop), inner = within[0], prod(dims[1:])
    if all(cut == (0, size) for cut, size in zip(within[1:], dims[1:], strict=True)):
        return [(start * inner, stop * inner)]
    of_inner = _runs_of_one(dims[1:], within[1:])
    return [(place * inner + first, place * inner + last) for place in range(start, stop) for first, last in of_inner]


def _check_shapes(source: TensorSource, path: str, weight: Weight, target: Shape) -> None:
    if weight.is_stack:  # each by itself: there may be one a layer
        for name in weight.tensors:
            _check_shapes(source, path, replace(weight, tensors=(name,), is_stack=False), target[1:])
        return
    found = places(source, weight, target)
    fit = all(_groups(_orient(source, name, weight), place.shape) is not None for name, place in found.items())
    if not fit or sum(place.size for place in found.values()) != target[weight.axis % len(target)]:
        shapes = " and ".join(f"tensor {name!r} has shape {list(_shape(source, name, weight))}" for name in weight.tensors)
        raise CheckpointError(
            f"{source.path}: {shapes}, but the configuration calls for {list(target)}{' side by side' if len(found) > 1 else ''}"
            f"{' transposed' if weight.transpose else ''} (parameter {path!r}): check that the configuration belongs to these weights"
        )


def _some(unordered: Iterable[str]) -> str:
    names = sorted(unordered)
    listed = ", ".join(repr(name) for name in names[:3])
    return f"tensor {listed} is" if len(names) == 1 else f"tensors {listed}{f' and {len(names) - 3} more' if len(names) > 3 else ''} are"


def _shape(source: TensorSource, name: str, weight: Weight) -> Shape:
    """The shape of a tensor, or of that stored part of it which the weight names."""
    if weight.part is None:
        return tuple(source.shape(name))
    stored = source.stored(name)
    shape = stored.shape_of(weight.part)
    if shape is None:
        raise CheckpointError(f"{source.path}: tensor {name!r} is stored as {stored.format}, which has no part {weight.part!r}")
    return shape


def _orient(source: TensorSource, name: str, weight: Weight) -> Shape:
    shape = _shape(source, name, weight)
    return shape[::-1] if weight.transpose else shape


def _groups(tensor: Shape, param: Shape) -> list[Shape] | None:
    """The runs of `param`'s dimensions that make up each of `tensor`'s: (576, 192) and (576, 3, 64) -> [(576,), (3,
    64)].

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
