"""Parameters with named axes, and matrices in a weight format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats.weight_format import MatrixAxes, ModelWeightFormat, WeightFormat


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter with logically named dimensions; sharding rules map them to mesh axes. It has a shape and no array:
    modules are made to be templates, and get their arrays from a checkpoint (`weights/template.py`)."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), logical_axes=axes)


@dataclass(frozen=True)
class Matrix:
    """A module's matrix: its parameters, and the format that multiplies them."""

    weight_format: WeightFormat
    axes: MatrixAxes
    names: tuple[str, ...]  # of parameters, in the order of the format's leaves

    def product(
        self, module: nnx.Module, x: Float[Array, "T I"], context: StepContext = NO_CONTEXT, *, is_summed: bool = True
    ) -> Float[Array, "..."]:
        return self.weight_format.product(x, self.arrays(module), self.axes, context, is_summed=is_summed)

    def arrays(self, module: nnx.Module) -> list[Any]:
        return [getattr(module, name).get_value() for name in self.names]


def add_matrix(
    module: nnx.Module, name: str, outputs: dict[str, int], inputs: dict[str, int], weight_format: ModelWeightFormat, *, inputs_first: bool
) -> Matrix:
    """Add a matrix's parameters to a module: `name`, and others with suffixes. `inputs_first`: its layout in the plain
    format."""
    axes = MatrixAxes(tuple(outputs.items()), tuple(inputs.items()), inputs_first)
    return _add(module, name, axes, weight_format.matrices.for_matrix(axes))


def keep_formats(model: nnx.Module, formats: Mapping[str, WeightFormat]) -> None:
    """Give these matrices, by names such as "blocks.3.mlp.down.kernel", formats of their own."""
    for path, module in nnx.iter_modules(model):
        matrix = getattr(module, "matrix", None)
        if not isinstance(matrix, Matrix) or (name := ".".join(map(str, (*path, matrix.names[0])))) not in formats:
            continue
        for parameter in matrix.names:
            delattr(module, parameter)
        setattr(module, "matrix", _add(module, matrix.names[0], matrix.axes, formats[name]))  # noqa: B010


def _add(module: nnx.Module, name: str, axes: MatrixAxes, of_matrix: WeightFormat) -> Matrix:
    names = []
    for leaf in of_matrix.leaves(axes):
        param = weight(leaf.shape, leaf.axes, leaf.dtype)
        if leaf.suffix:
            param.set_metadata(is_companion=True)
        elif not of_matrix.is_plain:
            param.set_metadata(weight_format=of_matrix, matrix_axes=axes, is_read_in_place=leaf.is_read_in_place)
        names.append(name + leaf.suffix)
        setattr(module, names[-1], param)
    return Matrix(of_matrix, axes, tuple(names))
