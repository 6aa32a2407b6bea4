"""Parameters with named axes, and the forms in which matrices lie in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Shaped

from pallas_kernels.packed_matmul.layout import GROUP, LANES, packed_dtype, packs

INT8 = jnp.dtype("int8")


@dataclass(frozen=True)
class ExpertFormat:
    """How the matrices of a mixture's experts are kept, and multiplied: never as `pallas_kernels.packed_matmul` reads them, nor as 8-bit
    integers with a scale an output."""

    dtype: jnp.dtype | None = None  # None: that of all other matrices; bfloat16 beside integers
    packing: Literal["int4", "fp8"] | None = None  # as `pallas_kernels.grouped_matmul.formats` has them; None: plain, of that type
    backend: Literal["mosaic_gpu", "xla"] = "xla"  # of `grouped_matmul`

    def __str__(self) -> str:
        kept = self.packing or self.dtype
        return f"{kept} by {self.backend}" if kept else f"by {self.backend}"


@dataclass(frozen=True)
class MatrixFormat:
    """How a model's matrices are kept. Integers have a scale an output."""

    dtype: jnp.dtype
    is_packed: bool = False  # as `pallas_kernels.packed_matmul` reads them, where their sizes allow it
    experts: ExpertFormat = ExpertFormat()

    @property
    def is_int8(self) -> bool:
        return self.dtype == INT8

    @property
    def vector_dtype(self) -> jnp.dtype:
        """The type of vectors (norms, biases, scales): beside integers they stay float32."""
        return jnp.dtype("float32") if self.is_int8 else self.dtype

    @property
    def expert_dtype(self) -> jnp.dtype:
        """The type of experts' matrices where they are plain."""
        return self.experts.dtype or (jnp.dtype(jnp.bfloat16) if self.is_int8 else self.dtype)

    def __str__(self) -> str:
        experts = "" if self.experts == ExpertFormat() else f", experts {self.experts}"
        return f"{self.dtype}{' packed' if self.is_packed else ''}{experts}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InStack:
    """One of several packed matrices in one array: a slice of it would be a copy."""

    stack: Shaped[Array, "S ..."]
    place: Int[Array, ""]


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter whose dimensions carry logical names; which mesh axis they lie on is decided outside the model."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


def matrix(outputs: dict[str, int], inputs: dict[str, int], form: MatrixFormat, *, inputs_first: bool) -> nnx.Param:
    """A parameter that is a matrix from its input axes to its output axes. Packed, or of integers, its outputs come first; otherwise
    what `inputs_first` says."""
    shape = (*outputs.values(), *inputs.values())
    axes: tuple[str | None, ...] = (*outputs, *inputs)
    if form.is_packed and packs(form.dtype, list(outputs.values())[-1], list(inputs.values())[-1]):
        group = GROUP[form.dtype.name]
        last = len(outputs) - 1
        shape = (*shape[:last], shape[last] // LANES, *shape[last + 1 : -1], shape[-1] // group, LANES, group)
        param = weight(shape, (*axes, None, None), packed_dtype(form.dtype))
        param.set_metadata(is_packed=True, output_axes=len(outputs))
        return param
    if inputs_first and not form.is_int8:
        return weight((*inputs.values(), *outputs.values()), (*inputs, *outputs), form.dtype)
    param = weight(shape, axes, form.dtype)
    if form.is_int8:
        param.set_metadata(output_axes=len(outputs))
    return param
