"""How a packed matrix lies in memory: in the order in which a CPU kernel reads it.

Its outputs are cut into panels of 16. A panel holds, for each group of inputs in order, that group of each of its 16
outputs. A group is 4 bytes: one float32, two bfloat16, or four 8-bit integers, the latter unsigned (128 added), as
x86's integer product needs them. So 16 groups fill a 512-bit register.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Shaped

LANES = 16
GROUP: Mapping[str, int] = {"float32": 1, "bfloat16": 2, "int8": 4}  # inputs in 4 bytes
ZERO = 128  # zero point of packed integers


def packs(dtype: jnp.dtype, num_outputs: int, num_inputs: int) -> bool:
    """Whether a matrix whose innermost axes of outputs and of inputs have these sizes can be packed."""
    return dtype.name in GROUP and num_outputs % LANES == 0 and num_inputs % GROUP[dtype.name] == 0


def packed_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type that a matrix of this type is packed as."""
    return jnp.dtype(jnp.uint8) if dtype == jnp.int8 else dtype


def pack(matrix: Shaped[Array, "*O I"], dtype: jnp.dtype, output_axes: int = 1) -> Shaped[Array, "*P K 16 G"]:
    """A matrix [outputs..., inputs...] with `output_axes` axes of outputs, packed as this type: [outputs... / 16,
    inputs... / group, 16, group]. Only the innermost axis of each is cut. Raises `ValueError` where it can't be."""
    outputs, inputs = matrix.shape[:output_axes], matrix.shape[output_axes:]
    if not packs(dtype, outputs[-1], inputs[-1]):
        raise ValueError(
            f"pack: {matrix.shape} as {dtype} needs outputs in multiples of {LANES} and inputs in whole groups of {dict(GROUP)}"
        )
    group = GROUP[dtype.name]
    cut = matrix.reshape(*outputs[:-1], outputs[-1] // LANES, LANES, *inputs[:-1], inputs[-1] // group, group)
    # before it is narrowed: XLA on a CPU moves 2-byte elements far slower than 4-byte ones
    moved = jnp.moveaxis(cut, output_axes, -2)
    return (moved.astype(jnp.int16) + ZERO).astype(jnp.uint8) if dtype == jnp.int8 else moved.astype(dtype)


def unpack(packed: Shaped[Array, "*P K 16 G"], output_axes: int = 1) -> Shaped[Array, "*O I"]:
    """The inverse of `pack`."""
    cut = jnp.moveaxis(packed, -2, output_axes)
    outputs, inputs = cut.shape[: output_axes + 1], cut.shape[output_axes + 1 :]
    matrix = cut.reshape(*outputs[:-2], outputs[-2] * LANES, *inputs[:-2], inputs[-2] * inputs[-1])
    return (matrix.astype(jnp.int16) - ZERO).astype(jnp.int8) if packed.dtype == jnp.uint8 else matrix
