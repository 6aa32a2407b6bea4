"""Which matrices of a checkpoint stay in blocks in memory: a GGUF file's, or integers of 4 bits in groups."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh

from checkpoints.source import Stored, TensorSource
from jaxinfer.weights.formats.gguf_blocks import GgufBlocks
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.template import Leaf, Template
from pallas_kernels.block_matmul.block_types import BLOCK_TYPES
from sharding.partition import named_sharding
from sharding.rules import Rules

KeptMatrices = tuple[tuple[str, GgufBlocks], ...]


def kept_blocks(template: Template[Any], source: TensorSource) -> KeptMatrices:
    """By name, matrices that this template packs for a CPU, whose tensors all have blocks of one type with a kernel."""
    matrices = template.weight_format.matrices
    if not isinstance(matrices, Packed) or matrices.dtype == "int8":
        return ()
    weight_map = template.model.weight_map
    names = weight_map.names_in(source.names())
    found = []
    of_matrices = [(path, leaf.matrix_axes) for leaf in template.leaves if leaf.matrix_axes is not None for path in leaf.paths]
    for path, axes in of_matrices:
        weight = weight_map.find(path)
        types = {_block_type(source.stored(names[name])) for name in weight.tensors if name in names}
        if len(types) != 1 or not types <= BLOCK_TYPES.keys() or weight.transpose != axes.inputs_first:
            continue
        blocks = GgufBlocks(matrices.dtype, types.pop())
        if blocks.holds(axes) and blocks.unsupported_reason("cpu") is None:
            found.append((path, blocks))
    return tuple(found)


def _block_type(stored: Stored) -> str:
    return stored.format if stored.blocks is None else stored.blocks[0]


def undivided(template: Template[Any], mesh: AbstractMesh, rules: Rules) -> frozenset[str]:
    """The names of matrices in blocks that this mesh, with its heads, can't divide between blocks or panels."""
    spread_axes = frozenset[str]() if template.heads is None else template.heads.spread_axes
    return frozenset(path for leaf in template.leaves if not _is_divided(leaf, mesh, rules, spread_axes) for path in leaf.paths)


def _is_divided(leaf: Leaf, mesh: AbstractMesh, rules: Rules, spread_axes: frozenset[str]) -> bool:
    if not isinstance(leaf.weight_format, GgufBlocks) or leaf.matrix_axes is None:
        return True
    inputs = leaf.matrix_axes.inputs
    if inputs[0][0] in spread_axes and inputs[-1][1] % leaf.weight_format.kind.size:
        return False  # heads are moved, and a block belongs to several
    try:
        named_sharding(mesh, rules, leaf.axes, leaf.shape, leaf.name)
    except ValueError:
        return False
    return True
