"""lossless_matmul on a CPU: LLVM compiles the kernels for the host's processor, and XLA's programs call them through
`jax.ffi`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int, UInt8, UInt16

from pallas_kernels.llvm.host import host_target, register
from pallas_kernels.lossless_matmul import llvm_ir, packing_llvm_ir
from pallas_kernels.lossless_matmul.layout import LANES, STEP_VALUES, tile_bytes

NAME = "jaxinfer_lossless"  # prefix of the custom calls' names


def lossless_matmul(x: BFloat16[Array, "T I"], matrices: UInt8[Array, "S P K B"], place: Int[Array, ""]) -> Float32[Array, "T O"]:
    """See op.py."""
    name = register(f"{NAME}_matmul", lambda: llvm_ir.module(host_target()))
    result = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[1] * LANES), jnp.float32)
    sums: Float32[Array, "T O"] = jax.ffi.ffi_call(name, result)(x, matrices, place)
    return sums


def pack_tiles(values: UInt16[Array, "N V"]) -> UInt8[Array, "N B"]:
    """See `layout.pack_tiles_plainly`: tiles of the same values, though their exponent may be another."""
    name = register(f"{NAME}_pack", lambda: packing_llvm_ir.module(host_target()))
    result = jax.ShapeDtypeStruct((values.shape[0], tile_bytes(values.shape[1] // STEP_VALUES)), jnp.uint8)
    packed: UInt8[Array, "N B"] = jax.ffi.ffi_call(name, result)(values)
    return packed
