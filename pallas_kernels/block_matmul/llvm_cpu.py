"""block_matmul on a CPU: LLVM compiles the kernels for the host's processor, and XLA's programs call them through
`jax.ffi`."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.block_matmul import llvm_ir, rounding_llvm_ir
from pallas_kernels.block_matmul.block_types import BlockType
from pallas_kernels.block_matmul.expansion_llvm_ir import Number, has_offset
from pallas_kernels.block_matmul.layout import LANES
from pallas_kernels.llvm.host import host_target, register

NAME = "jaxinfer_block_matmul"  # prefix of the custom calls' names; types follow


def block_matmul(
    x: Float[Array, "T I"], matrices: UInt8[Array, "S P K B"], place: Int[Array, ""], kind: BlockType, *, is_rounded: bool = False
) -> Float32[Array, "T O"]:
    """See op.py."""
    result = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[1] * LANES), jnp.float32)
    arguments: tuple[Array, ...]
    if is_rounded:
        rounded, sums, units = _rounded(x, kind)
        number, arguments = "int16", (rounded, matrices, place, sums, units)
    else:
        number, arguments = x.dtype.name, (x, matrices, place)
        if has_offset(kind):
            arguments += (jnp.sum(x.astype(jnp.float32).reshape(len(x), -1, kind.group), axis=-1),)
    name = register(f"{NAME}_{kind.name.replace(' ', '_')}_{number}", lambda: llvm_ir.module(kind, cast(Number, number), host_target()))
    y: Float32[Array, "T O"] = jax.ffi.ffi_call(name, result)(*arguments)
    return y


def _rounded(x: Float[Array, "T I"], kind: BlockType) -> tuple[Array, Array, Array]:
    """Rows of integers, their sums in each group, and their units: see `rounding_llvm_ir`."""
    num_rows, num_inputs = x.shape
    results = [
        jax.ShapeDtypeStruct((num_rows, num_inputs), jnp.int16),
        jax.ShapeDtypeStruct((num_rows, num_inputs // kind.group), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.float32),
    ]
    order = "bytes" if kind.bits == 8 else "nibbles"
    name = register(f"{NAME}_rounding_{order}_{kind.group}", lambda: rounding_llvm_ir.module(kind, host_target()))
    rounded, sums, units = jax.ffi.ffi_call(name, results)(x.astype(jnp.float32))
    return rounded, sums, units
