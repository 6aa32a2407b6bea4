"""Which quantised experts of a checkpoint stay in its format in memory, and which tensors are dequantised."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoints.source import PLAIN, TensorSource
from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.weights.formats.registry import STORED_EXPERTS
from jaxinfer.weights.formats.tiled import Tiled
from jaxinfer.weights.formats.tiled_experts import experts_axes
from jaxinfer.weights.template import Leaf, Template
from pallas_kernels.grouped_matmul.formats import INPUTS, OUTPUTS

logger = logging.getLogger(__name__)

_PACKINGS = {one.stored_as: name for name, one in STORED_EXPERTS.items()}
_METHODS = {one.quant_method: name for name, one in STORED_EXPERTS.items()}
_TILE = max(OUTPUTS, INPUTS)


def choose_packing(template: Template[Any], source: TensorSource, num_devices: Sequence[int]) -> str | None:
    """The packing of experts that are plain in this template, on meshes that split each over `num_devices` (1 with
    expert parallelism). None if they must stay plain: missing, not quantised, in another format, or not divisible into
    tiles."""
    matrices = _experts_of(template)
    if not matrices:
        return None
    packing, reason = _packing_of(matrices, template.model.weight_map, source, max(num_devices))
    logger.info("experts: stored as %s (%s)", packing or matrices[0].dtype, reason)
    return packing


def published_packing(method: str | None, template: Template[Any], num_devices: Sequence[int]) -> str | None:
    """The packing without the checkpoint: by its config.json's quantisation method, assumed to apply to all experts."""
    packing = _METHODS.get(method or "")
    matrices = _experts_of(template)
    return None if packing is None or _untiled_reason(matrices, max(num_devices)) else packing


def lossless_packing(template: Template[Any]) -> str | None:
    """The packing of experts that are plain in this template and can be lossless, where its other matrices are; None if
    they stay plain."""
    tiled = template.weight_format.matrices
    if not isinstance(tiled, Tiled):
        return None
    axes = [tuple((str(name), size) for name, size in zip(leaf.axes, leaf.shape, strict=True)) for leaf in _experts_of(template)]
    return "lossless" if all(tiled.for_matrix(experts_axes(each)) == tiled for each in axes) else None


def _experts_of(template: Template[Any]) -> list[Leaf]:
    return [leaf for leaf in template.leaves if leaf.is_of_experts]


def dequantised(template: Template[Any], source: TensorSource) -> dict[str, int]:
    """The number of tensors, by format, that the checkpoint has quantised and this template has not; logged too."""
    weight_map = template.model.weight_map
    names = weight_map.names_in(source.names())
    # Scales belong to their matrices.
    kept = dict(template.weight_format.kept)
    of_leaves = [
        (path, leaf) for leaf in template.leaves if leaf.part is None and not leaf.is_companion for path in leaf.paths if path not in kept
    ]
    tensors = {name for path, leaf in of_leaves for name in _tensors(weight_map.find(path), leaf)}
    # Missing tensors are reported elsewhere, before anything is loaded.
    formats = Counter(source.stored(names[name]).format for name in tensors if name in names)
    found = {name: formats[name] for name in sorted(formats.keys() - set(PLAIN))}
    for name, count in found.items():
        logger.info("%d tensors in %s are dequantised to %s", count, name, template.weight_format.dtype)
    return found


def _packing_of(matrices: Sequence[Leaf], weight_map: WeightMap, source: TensorSource, num_devices: int) -> tuple[str | None, str]:
    """The packing or None, and the reason."""
    names = weight_map.names_in(source.names())
    tensors = [name for leaf in matrices for name in _tensors(weight_map.find(leaf.name), leaf)]
    if missing := sum(name not in names for name in tensors):
        return None, f"{missing} tensors of them are missing"
    stored = [source.stored(names[name]) for name in tensors]
    formats = sorted({one.format for one in stored})
    if len(formats) > 1 or formats[0] not in _PACKINGS:
        return None, f"the checkpoint has them in {' and '.join(formats)}: packed are {' and '.join(_PACKINGS)}"
    packing = _PACKINGS[formats[0]]
    for part in STORED_EXPERTS[packing].parts:
        types = {one.parts[part.name].dtype for one in stored}
        if not all(np.can_cast(dtype, part.dtype) for dtype in types):
            return None, f"the checkpoint's {part.name} is {' and '.join(sorted(map(str, types)))}: only {part.dtype} is packed"
    if reason := _untiled_reason(matrices, num_devices):
        return None, reason
    return packing, f"as the checkpoint has them, {formats[0]}"


def _untiled_reason(matrices: Sequence[Leaf], num_devices: int) -> str | None:
    """Why tiles don't divide experts that are split over so many devices; None if they do."""
    for leaf in matrices:
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            of_device = size // num_devices if axis == "expert_mlp" else size
            if axis in ("embed", "expert_mlp") and of_device % _TILE:
                return f"their {axis} axis has {of_device} on a device, of {num_devices}: only multiples of {_TILE} are packed"
    return None


def _tensors(weight: Weight, leaf: Leaf) -> Sequence[str]:
    if not weight.is_of_experts:
        return weight.tensors
    return [name for expert in range(leaf.shape[0]) for name in weight.of_expert(expert, len(leaf.shape)).tensors]
