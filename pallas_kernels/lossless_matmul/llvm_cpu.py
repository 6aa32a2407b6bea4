"""lossless_matmul on a CPU: LLVM compiles the kernels for the host's processor, and XLA's programs call them through
`jax.ffi`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int, UInt8, UInt16

from pallas_kernels.llvm.host import host_target, register
from pallas_kernels.lossless_matmul import llvm_ir
from pallas_kernels.lossless_matmul.layout import HEADER_BYTES, LANES, STEP_BYTES, STEP_VALUES

NAME = "jaxinfer_lossless"  # prefix of the custom calls' names


def lossless_matmul(x: BFloat16[Array, "T I"], matrices: UInt8[Array, "S P K B"], place: Int[Array, ""]) -> Float32[Array, "T O"]:
    """See op.py."""
    name = register(f"{NAME}_matmul", lambda: llvm_ir.product_module(host_target()))
    result = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[1] * LANES), jnp.float32)
    sums: Float32[Array, "T O"] = jax.ffi.ffi_call(name, result)(x, matrices, place)
    return sums


def pack_tiles(values: UInt16[Array, "N V"]) -> UInt8[Array, "N B"]:
    """See `layout.pack_tiles`: of the same values, though perhaps by another exponent."""
    name = register(f"{NAME}_pack", lambda: llvm_ir.packing_module(host_target()))
    num_bytes = HEADER_BYTES + values.shape[1] // STEP_VALUES * STEP_BYTES
    packed: UInt8[Array, "N B"] = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((values.shape[0], num_bytes), jnp.uint8))(values)
    return packed
