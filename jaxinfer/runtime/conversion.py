"""From a checkpoint's arrays to those that a model's programs take: matrices of integers, packed ones, packed experts, each converted as
soon as it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxinfer.layers.int8 import quantize
from jaxinfer.layers.matrices import INT8, MatrixFormat
from jaxinfer.runtime.template import SCALE, Leaf, Template, Weights, template_of
from pallas_kernels.grouped_matmul.formats import PARTS
from pallas_kernels.packed_matmul.layout import pack
from sharding.rules import Rules

_PARTS = {part.name: part for parts in PARTS.values() for part in parts}


class Conversion:
    """`plain` is the template to load by: float32, its matrices as in checkpoints, of packed experts the arrays that those are stored as
    there; it is the given one itself where nothing is to be converted. `convert` takes its arrays, one at a time and in any thread; `weights` puts together what came of them."""

    def __init__(self, template: Template[Any], mesh: Mesh, rules: Rules) -> None:
        self._mesh, self._form = mesh, template.form
        self.plain: Template[Any] = template
        if self._form.is_packed or self._form.is_int8:
            experts = replace(self._form.experts, dtype=self._form.expert_dtype)
            form = MatrixFormat(jnp.dtype("float32"), experts=experts)
            self.plain = template_of(template.model, template.config, form, template.activation_dtype)
        if any(leaf.part for leaf in self.plain.leaves):
            self.plain = replace(self.plain, leaves=tuple(map(stored_leaf, self.plain.leaves)))
        self._targets = list(zip(template.leaves, template.abstract(mesh, rules), strict=True))
        self._target_of = {name: (leaf, target) for leaf, target in self._targets for name in (*leaf.paths, leaf.name)}
        self._axes = {leaf.name: leaf.axes for leaf in self.plain.leaves}

    def convert(self, name: str, array: Array) -> Any:
        """A matrix as the template has it, and its scales if it is of integers; of all else only the type may change."""
        leaf, target = self._target_of[name]
        if leaf.part:
            return _packer(leaf.part, self._mesh, jax.typeof(array).sharding.spec, target.sharding.spec)(array)
        if leaf.output_axes is None:
            return array.astype(leaf.dtype)
        # Where each dimension of the converted matrix comes from: outputs first.
        order = tuple(self._axes[name].index(axis) for axis in leaf.axes_of_one if axis is not None)
        spec = PartitionSpec(*target.sharding.spec[leaf.is_stack :])
        with jax.set_mesh(self._mesh):
            return _converter(order, leaf.output_axes, leaf.is_packed, self._form.dtype, spec)(array)

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


@cache
def _converter(order: tuple[int, ...], output_axes: int, is_packed: bool, dtype: jnp.dtype, spec: PartitionSpec) -> Callable[[Array], Any]:
    """One for all matrices of a kind: it compiles once."""
    convert = partial(_convert, order=order, output_axes=output_axes, is_packed=is_packed, dtype=dtype)
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
