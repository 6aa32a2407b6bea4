"""Loads a model's weights from a checkpoint, or makes random ones, on a mesh."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from checkpoints.loader import check, load
from checkpoints.source import BLOCKS, TensorSource, last_word
from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.weights.conversion import Conversion
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import MatrixAxes, ModelWeightFormat
from jaxinfer.weights.template import Leaf, Template, Weights, template_of
from sharding.partition import place
from sharding.rules import Rules

_PLAIN = ModelWeightFormat(Plain(jnp.dtype("float32")))  # the check is the same for any format


def load_weights(template: Template[Any], source: TensorSource, mesh: Mesh, rules: Rules) -> Weights:
    """The checkpoint's weights on the mesh; each device reads only its part. Raises `CheckpointError`, also for tensors
    without a parameter if the template is of the whole model."""
    conversion = Conversion(template, mesh, rules, as_stored=True)
    weight_map = template.model.weight_map
    leaves_out = bool(weight_map.unread) and not template.has_unread
    if leaves_out and template.part is None:
        check_tensors(template, source)
    for leaf in conversion.plain.leaves:
        if leaf.is_stack:
            weight_map = weight_map.with_stack(leaf.name, leaf.paths)
        elif leaf.part:
            weight_map = _with_part(weight_map, leaf.name, leaf.part)
        elif axes := conversion.outputs_first(leaf):
            weight_map = _outputs_first(weight_map, leaf.name, axes)
            if conversion.is_of_blocks(leaf):
                found = weight_map.find(leaf.name)
                blocks = replace(found, part=BLOCKS if _is_made_of_blocks(source, weight_map, found) else last_word(found.tensors[0]))
                weight_map = replace(weight_map, weights={**weight_map.weights, leaf.name: blocks})
    names = [leaf.name for leaf in conversion.plain.leaves]
    loaded = load(
        source,
        dict(zip(names, conversion.abstract, strict=True)),
        weight_map,
        conversion.convert,
        is_partial=leaves_out or template.part is not None,
    )
    return conversion.weights(loaded)


def _is_made_of_blocks(source: TensorSource, weight_map: WeightMap, weight: Weight) -> bool:
    """Whether the source makes blocks of what it has; else these are what it has."""
    name = weight_map.names_in(source.names()).get(weight.tensors[0])
    return name is not None and source.stored(name).blocks is not None


def check_tensors(template: Template[Any], source: TensorSource) -> None:
    """Raise the `CheckpointError` of loading all weights, those of unread modules too, before reading any."""
    config = template.config.with_own_heads() if isinstance(template.config, ArchitectureConfig) else template.config
    whole = template_of(template.model, config, _PLAIN, _PLAIN.vector_dtype, has_unread=True)
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape[1:] if leaf.is_stack else leaf.shape, leaf.dtype)
        for leaf in whole.leaves
        for path in leaf.paths
    }
    check(source, shapes, template.model.weight_map)


def _with_part(weight_map: WeightMap, path: str, part: str) -> WeightMap:
    """With an entry for one part of experts' packed tensors: such as "blocks.3.experts.gate_up_words", from the tensors
    of "blocks.3.experts.gate_up". Packed tensors have their outputs first."""
    found = weight_map.find(path.rpartition("_")[0])
    axis = 1 if len(found.tensors) > 1 else 0
    return replace(weight_map, weights={**weight_map.weights, path: replace(found, transpose=False, axis=axis, part=part)})


def _outputs_first(weight_map: WeightMap, path: str, axes: MatrixAxes) -> WeightMap:
    """With an entry for a matrix that is loaded with its outputs first, as it is stored: it is not transposed."""
    found = weight_map.find(path)
    if not found.transpose:
        return weight_map
    axis = found.axis if found.axis >= 0 else found.axis + len(axes.outputs)
    return replace(weight_map, weights={**weight_map.weights, path: replace(found, transpose=False, axis=axis)})


def random_weights(template: Template[Any], mesh: Mesh, rules: Rules) -> Weights:
    """Random weights, the same on every mesh: normal, scaled by fan-in; vectors (norms) are ones, packed words any
    bits."""
    conversion = Conversion(template, mesh, rules)

    def make(leaf: Leaf, target: jax.ShapeDtypeStruct) -> Array:
        # Seeded by the parameter's name: independent of what else is on this mesh.
        random = np.random.default_rng(zlib.crc32(leaf.paths[0].encode()))
        inputs = target.shape[-1 if leaf.part else 1 if leaf.axes[0] == "experts" else 0]
        if leaf.is_stack or len(leaf.shape) == 1:
            value = np.ones(target.shape, np.float32)
        elif leaf.dtype == jnp.int32:
            value = random.integers(-(2**31), 2**31, target.shape, np.int32)
        else:
            value = random.standard_normal(target.shape, np.float32) / np.sqrt(np.float32(inputs))
        return place(value.astype(target.dtype), target.sharding)

    targets = zip(conversion.plain.leaves, conversion.abstract, strict=True)
    return conversion.weights({leaf.name: conversion.convert(leaf.name, make(leaf, target)) for leaf, target in targets})


def weight_bytes(weights: Weights) -> int:
    """Bytes of the weights on one device of the mesh."""
    return sum(w.addressable_shards[0].data.nbytes for w in weights)
