"""From a checkpoint's arrays to those that a model's programs take: matrices of integers, packed ones, each converted as soon as it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxinfer.layers.int8 import quantize
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.runtime.template import SCALE, Leaf, Template, Weights, template_of
from pallas_kernels.packed_matmul.layout import pack
from sharding.rules import Rules


class Conversion:
    """`plain` is the template to load by: its matrices lie as in checkpoints and are float32 where the given template's are integers; it
    is the given one itself where nothing is to be converted. `convert` takes its arrays, one at a time and in any thread; `weights` puts
    together what came of them."""

    def __init__(self, template: Template[Any], mesh: Mesh, rules: Rules) -> None:
        self._mesh, self._form = mesh, template.form
        form = MatrixFormat(template.form.vector_dtype)
        self.plain: Template[Any] = template
        if form != template.form:
            self.plain = template_of(template.model, template.config, form, template.activation_dtype)
        self._targets = list(zip(template.leaves, template.abstract(mesh, rules), strict=True))
        self._target_of = {path: (leaf, target) for leaf, target in self._targets for path in leaf.paths}
        self._axes = {leaf.name: leaf.axes for leaf in self.plain.leaves}

    def convert(self, name: str, array: Array) -> Any:
        """A matrix as the template has it, and its scales if it is of integers; all else stays."""
        leaf, target = self._target_of.get(name, (None, None))
        if leaf is None or leaf.output_axes is None:
            return array
        # Where each dimension of the converted matrix comes from: outputs first.
        order = tuple(self._axes[name].index(axis) for axis in leaf.axes_of_one if axis is not None)
        with jax.set_mesh(self._mesh):
            spec = PartitionSpec(*target.sharding.spec[leaf.is_stack :])
            return _converter(order, leaf.output_axes, leaf.is_packed, self._form.is_int8, spec)(array)

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
            stack = jnp.zeros(target.shape, target.dtype, device=target.sharding)
            for place, path in enumerate(leaf.paths):
                stack = _put(stack, arrays.pop(path), place)
            return stack


@partial(jax.jit, donate_argnums=0)
def _put(stack: Array, one: Array, place: int) -> Array:
    return stack.at[place].set(one)


@cache
def _converter(order: tuple[int, ...], output_axes: int, is_packed: bool, is_int8: bool, spec: PartitionSpec) -> Callable[[Array], Any]:
    """One for all matrices of a kind: it compiles once."""
    convert = partial(_convert, order=order, output_axes=output_axes, is_packed=is_packed, is_int8=is_int8)
    specs = (spec, PartitionSpec(*spec[:output_axes])) if is_int8 else spec
    converter: Callable[[Array], Any] = jax.jit(jax.sharding.auto_axes(convert, out_sharding=specs))
    return converter


def _convert(matrix: Array, order: tuple[int, ...], output_axes: int, is_packed: bool, is_int8: bool) -> Any:
    turned = matrix.transpose(order)
    if not is_int8:
        return pack(turned, output_axes) if is_packed else turned
    values, scale = quantize(turned.reshape(*turned.shape[:output_axes], -1))
    values = values.reshape(turned.shape)
    return pack(values, output_axes) if is_packed else values, scale
