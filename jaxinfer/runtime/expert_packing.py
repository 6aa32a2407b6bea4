"""What of a quantised checkpoint is kept in memory as it is there: a mixture's experts, where they can be; and what is not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from checkpoints.source import FP8_BLOCKS, INT4_GROUPS, PLAIN, TensorSource
from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.runtime.template import SCALE, Leaf, Template
from pallas_kernels.grouped_matmul.formats import INPUTS, OUTPUTS, PARTS

logger = logging.getLogger(__name__)

Packing = Literal["int4", "fp8"]

_PACKINGS: dict[str, Packing] = {INT4_GROUPS: "int4", FP8_BLOCKS: "fp8"}
_TILE = max(OUTPUTS, INPUTS)


def choose_packing(template: Template[Any], source: TensorSource, num_devices: Sequence[int]) -> Packing | None:
    """The packing for a model whose experts are plain in this template, on meshes that split each expert over so many devices (1: they have
    whole ones); None where they have to stay so: missing, not quantised, in another way, or of sizes that tiles don't divide."""
    matrices = [leaf for leaf in template.leaves if leaf.is_of_experts]
    if not matrices:
        return None
    packing, reason = _packing_of(matrices, template.model.weight_map, source, max(num_devices))
    logger.info("experts: kept as %s (%s)", packing or matrices[0].dtype, reason)
    return packing


def dequantised(template: Template[Any], source: TensorSource) -> dict[str, int]:
    """How many tensors are quantised in the checkpoint, by format, but not as this template has them; the log says it too."""
    weight_map = template.model.weight_map
    names = weight_map.names_in(source.names())
    # Scales are made with what they belong to.
    of_leaves = [(path, leaf) for leaf in template.leaves if leaf.part is None for path in leaf.paths if not path.endswith(SCALE)]
    tensors = {name for path, leaf in of_leaves for name in _tensors(weight_map.find(path), leaf)}
    # What is missing is told of, with all that it belongs to, before anything is loaded.
    formats = Counter(source.stored(names[name]).format for name in tensors if name in names)
    found = {name: formats[name] for name in sorted(formats.keys() - set(PLAIN))}
    for name, count in found.items():
        logger.info("%d tensors in %s are dequantised to %s", count, name, template.form.dtype)
    return found


def _packing_of(matrices: Sequence[Leaf], weight_map: WeightMap, source: TensorSource, num_devices: int) -> tuple[Packing | None, str]:
    """And why."""
    names = weight_map.names_in(source.names())
    tensors = [name for leaf in matrices for name in _tensors(weight_map.find(leaf.name), leaf)]
    if missing := sum(name not in names for name in tensors):
        return None, f"{missing} tensors of them are missing"
    stored = [source.stored(names[name]) for name in tensors]
    formats = sorted({one.format for one in stored})
    if len(formats) > 1 or formats[0] not in _PACKINGS:
        return None, f"the checkpoint has them in {' and '.join(formats)}: packed are {' and '.join(_PACKINGS)}"
    packing = _PACKINGS[formats[0]]
    for part in PARTS[packing]:
        types = {one.parts[part.name].dtype for one in stored}
        if not all(np.can_cast(dtype, part.dtype) for dtype in types):
            return None, f"the checkpoint's {part.name} is {' and '.join(sorted(map(str, types)))}: only {part.dtype} is packed"
    for leaf in matrices:
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            of_device = size // num_devices if axis == "expert_mlp" else size
            if axis in ("embed", "expert_mlp") and of_device % _TILE:
                return None, f"their {axis} axis has {of_device} on a device, of {num_devices}: only multiples of {_TILE} are packed"
    return packing, f"as the checkpoint has them, {formats[0]}"


def _tensors(weight: Weight, leaf: Leaf) -> Sequence[str]:
    if not weight.is_of_experts:
        return weight.tensors
    return [name for expert in range(leaf.shape[0]) for name in weight.of_expert(expert, len(leaf.shape)).tensors]
