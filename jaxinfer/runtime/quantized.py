"""From the arrays of a checkpoint to those of a model whose matrices are integers, each converted as soon as it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from jaxinfer.layers.int8 import INT8, quantize
from jaxinfer.runtime.template import SCALE, Template, Weights, template_of
from sharding.rules import Rules


class Narrow:
    """`wide` is the template to load by: its matrices are float32 where the given one's are integers, and it is the given one itself
    where they are not. `convert` takes its arrays, one at a time and in any thread; `weights` puts together what came of them."""

    def __init__(self, template: Template[Any], mesh: Mesh, rules: Rules) -> None:
        self._mesh = mesh
        self.wide: Template[Any] = template
        if template.dtype == INT8:
            self.wide = template_of(template.model, template.config, jnp.dtype("float32"), template.activation_dtype)
        self._targets = dict(zip(template.leaves, template.abstract(mesh, rules), strict=True))
        axes_of = {leaf.name: leaf.axes for leaf in self.wide.leaves}
        # Where each dimension of a converted matrix comes from: its input axes last.
        self._order = {
            leaf.name: tuple(axes_of[leaf.name].index(axis) for axis in leaf.axes) for leaf in template.leaves if leaf.dtype == INT8
        }
        scales = {path: leaf for leaf in template.leaves for path in leaf.paths if path.endswith(SCALE)}
        self._num_outputs = {name: len(scales[name + SCALE].shape) - scales[name + SCALE].is_stack for name in self._order}

    def convert(self, name: str, array: Array) -> Array | tuple[Array, Array]:
        """A matrix becomes integers and their scales, all else stays."""
        if name not in self._order:
            return array
        with jax.set_mesh(self._mesh):
            return _quantize(array, self._order[name], self._num_outputs[name])

    def weights(self, converted: Mapping[str, Any]) -> Weights:
        """In the order of the template's leaves."""
        arrays: dict[str, Array] = {}
        for name, value in converted.items():
            if name in self._order:
                arrays[name], arrays[name + SCALE] = value
            else:
                arrays[name] = value
        found = []
        for leaf, target in self._targets.items():
            array = arrays[leaf.name] if leaf.name in arrays else jnp.stack([arrays[path] for path in leaf.paths])
            found.append(jax.device_put(array, target.sharding))
        return tuple(found)


@partial(jax.jit, static_argnums=(1, 2))
def _quantize(matrix: Array, order: tuple[int, ...], num_outputs: int) -> tuple[Array, Array]:
    turned = matrix.transpose(order)
    values, scale = quantize(turned.reshape(*turned.shape[:num_outputs], -1))
    return values.reshape(turned.shape), scale
