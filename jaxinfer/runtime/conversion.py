"""From a checkpoint's arrays to those that a model's programs take: matrices of integers, packed ones, packed experts, a mesh's own heads,
each converted as soon as it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxinfer.layers.heads import HeadLayout
from jaxinfer.layers.int8 import quantize
from jaxinfer.layers.matrices import INT8, MatrixFormat
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.runtime.template import SCALE, Leaf, Template, Weights, template_of
from pallas_kernels.grouped_matmul.formats import PARTS
from pallas_kernels.packed_matmul.layout import pack
from sharding.rules import Rules

_PARTS = {part.name: part for parts in PARTS.values() for part in parts}


class Conversion:
    """`plain` is the template to load by: float32, its matrices as in checkpoints, with the model's own heads, of packed experts the arrays that
    those are stored as there; it is the given one itself where nothing is to be converted. `abstract`: its arrays on the mesh, heads whole on each
    device where the mesh has others. `convert` takes them, one at a time and in any thread; `weights` puts together what came of them."""

    def __init__(self, template: Template[Any], mesh: Mesh, rules: Rules) -> None:
        self._mesh, self._form = mesh, template.form
        config, form = template.config, self._form
        self._heads = config.heads if isinstance(config, ArchitectureConfig) else None
        self.plain: Template[Any] = template
        if isinstance(config, ArchitectureConfig):
            config = config.with_own_heads()
        if self._form.is_packed or self._form.is_int8:
            form = MatrixFormat(jnp.dtype("float32"), experts=replace(self._form.experts, dtype=self._form.expert_dtype))
        if (config, form) != (template.config, template.form):
            self.plain = template_of(template.model, config, form, template.activation_dtype, template.part)
        if any(leaf.part for leaf in self.plain.leaves):
            self.plain = replace(self.plain, leaves=tuple(map(stored_leaf, self.plain.leaves)))
        self._targets = list(zip(template.leaves, template.abstract(mesh, rules), strict=True))
        self._target_of = {name: (leaf, target) for leaf, target in self._targets for name in (*leaf.paths, leaf.name)}
        self._axes = {leaf.name: leaf.axes for leaf in self.plain.leaves}
        self._spread_axes = frozenset[str]() if self._heads is None else self._heads.spread_axes
        self.abstract = self.plain.abstract(mesh, {axis: of_mesh for axis, of_mesh in rules.items() if axis not in self._spread_axes})

    def convert(self, name: str, array: Array) -> Any:
        """A matrix as the template has it, and its scales if it is of integers; of all else only heads and the type may change."""
        leaf, target = self._target_of[name]
        if leaf.part:
            return _packer(leaf.part, self._mesh, jax.typeof(array).sharding.spec, target.sharding.spec)(array)
        axes = self._axes[name]
        heads = None if self._spread_axes.isdisjoint(axes) else self._heads
        if leaf.output_axes is None and heads is None:
            return array.astype(leaf.dtype)
        with jax.set_mesh(self._mesh):
            if leaf.output_axes is None:
                return _spreader(axes, heads, leaf.dtype, target.sharding.spec)(array)
            # Where each dimension of the converted matrix comes from: outputs first.
            order = tuple(axes.index(axis) for axis in leaf.axes_of_one if axis is not None)
            spec = PartitionSpec(*target.sharding.spec[leaf.is_stack :])
            return _converter(axes, heads, order, leaf.output_axes, leaf.is_packed, self._form.dtype, spec)(array)

    def weights(self, converted: Mapping[str, Any]) -> Weights:
        """In the order of the template's leaves."""
        arrays: dict[str, Array] = {}
        for name, value in converted.items():
            if isinstance(value, tuple):
                arrays[name], arrays[name + SCALE] = value
            else:
                arrays[name] = value
        found = []
        for leaf, target in self._targets:
            array = arrays.pop(leaf.name) if leaf.name in arrays and not leaf.is_packed else self._stack(leaf, target, arrays)
            found.append(jax.device_put(array, target.sharding))
        return tuple(found)

    def _stack(self, leaf: Leaf, target: jax.ShapeDtypeStruct, arrays: dict[str, Array]) -> Array:
        """One after the other, so that no more than one of them is held twice."""
        with jax.set_mesh(self._mesh):
            stack = jnp.zeros(target.shape, _bits(target.dtype), device=target.sharding)
            for place, path in enumerate(leaf.paths):
                stack = _put(stack, arrays.pop(path), place)
            return jax.lax.bitcast_convert_type(stack, target.dtype)


def stored_leaf(leaf: Leaf) -> Leaf:
    """Of packed experts: as the checkpoint has what it is made of; any other as it is."""
    if leaf.part is None:
        return leaf
    part = _PARTS[leaf.part]
    lead = len(leaf.shape) - len(part.tile)
    outputs, inputs = (tiles * size for tiles, size in zip(leaf.shape[lead - 2 : lead], part.cut, strict=True))
    return replace(leaf, axes=leaf.axes[:lead], shape=(*leaf.shape[: lead - 2], outputs, inputs), dtype=part.dtype)


@cache
def _packer(name: str, mesh: Mesh, stored: PartitionSpec, packed: PartitionSpec) -> Callable[[Array], Array]:
    """One for all of a kind. Devices split experts by whole tiles, so each packs its own."""

    def tiled(array: Array) -> Array:
        *lead, outputs, inputs = array.shape
        # One expert at a time: on the way a code takes eight times its room, or four.
        tiles = jax.lax.map(lambda one: _PARTS[name].pack(one[None])[0], array.reshape(-1, outputs, inputs))
        return tiles.reshape(*lead, *tiles.shape[1:])

    packer: Callable[[Array], Array] = jax.jit(jax.shard_map(tiled, mesh=mesh, in_specs=stored, out_specs=packed, check_vma=False))
    return packer


def _bits(dtype: jnp.dtype) -> jnp.dtype:
    """A type of the same size that XLA on a CPU updates in place: of a bfloat16 stack it would convert the whole each time."""
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else dtype


@partial(jax.jit, donate_argnums=0)
def _put(stack: Array, one: Array, place: int) -> Array:
    return stack.at[place].set(jax.lax.bitcast_convert_type(one, stack.dtype))


Axes = tuple[str | None, ...]


@cache
def _spreader(axes: Axes, heads: HeadLayout, dtype: jnp.dtype, spec: PartitionSpec) -> Callable[[Array], Array]:
    """One for all arrays of a kind: it compiles once."""

    def spread(array: Array) -> Array:
        return _spread(array, axes, heads).astype(dtype)

    spreader: Callable[[Array], Array] = jax.jit(jax.sharding.auto_axes(spread, out_sharding=spec))
    return spreader


@cache
def _converter(
    axes: Axes, heads: HeadLayout | None, order: tuple[int, ...], output_axes: int, is_packed: bool, dtype: jnp.dtype, spec: PartitionSpec
) -> Callable[[Array], Any]:
    """The same of matrices."""

    def convert(matrix: Array) -> Any:
        spread = matrix if heads is None else _spread(matrix, axes, heads)
        return _convert(spread, order, output_axes, is_packed, dtype)

    specs = (spec, PartitionSpec(*spec[:output_axes])) if dtype == INT8 else spec
    converter: Callable[[Array], Any] = jax.jit(jax.sharding.auto_axes(convert, out_sharding=specs))
    return converter


def _convert(matrix: Array, order: tuple[int, ...], output_axes: int, is_packed: bool, dtype: jnp.dtype) -> Any:
    turned = matrix.transpose(order)
    if dtype != INT8:
        return pack(turned, dtype, output_axes) if is_packed else turned.astype(dtype)
    values, scale = quantize(turned.reshape(*turned.shape[:output_axes], -1))
    values = values.reshape(turned.shape)
    return pack(values, dtype, output_axes) if is_packed else values, scale


def _spread(array: Array, axes: Axes, heads: HeadLayout) -> Array:
    """From the model's heads to a mesh's: copies, and zeros."""
    if "q_k_v" in axes:  # queries, key and value of each KV head, which may lose queries to its copies
        at, num_axes, sources, num_of_model = axes.index("kv_heads"), 2, heads.projections, heads.model_heads + 2 * heads.model_kv_heads
    elif "kv_heads" in axes:
        at, num_axes, sources, num_of_model = axes.index("kv_heads"), 1, heads.kv_heads, heads.model_kv_heads
    else:
        at, num_axes, sources, num_of_model = axes.index("heads"), 1, heads.query_heads, heads.model_heads
    before, after = array.shape[:at], array.shape[at + num_axes :]
    one_by_one = array.reshape(*before, num_of_model, -1, *after)  # a head may be some of its axis: vectors over all heads are flat
    places = np.array([num_of_model if source is None else source for source in sources])
    taken = jnp.take(one_by_one, places, axis=at, mode="fill", fill_value=0)
    return taken.reshape(*before, *((heads.num_kv_heads, heads.group + 2) if num_axes == 2 else (-1,)), *after)
