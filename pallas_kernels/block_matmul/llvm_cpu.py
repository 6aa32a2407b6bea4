"""block_matmul on a CPU: LLVM compiles the kernels for the host's processor, and XLA's programs call them through
`jax.ffi`."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.block_matmul import llvm_ir
from pallas_kernels.block_matmul.block_types import BlockType
from pallas_kernels.block_matmul.expansion_llvm_ir import has_offset
from pallas_kernels.block_matmul.layout import LANES
from pallas_kernels.llvm.host import host_target, register
from pallas_kernels.packed_matmul.llvm_ir import Kind

NAME = "jaxinfer_block_matmul"  # prefix of the custom calls' names; types follow


def block_matmul(
    x: Float[Array, "T I"], matrices: UInt8[Array, "S P K B"], place: Int[Array, ""], kind: BlockType
) -> Float32[Array, "T O"]:
    """See op.py."""
    number = cast(Kind, x.dtype.name)
    name = register(f"{NAME}_{kind.name}_{number}", lambda: llvm_ir.module(kind, number, host_target()))
    arguments = [x, matrices, place]
    if has_offset(kind):
        arguments.append(jnp.sum(x.astype(jnp.float32).reshape(len(x), -1, kind.group), axis=-1))
    result = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[1] * LANES), jnp.float32)
    sums: Float32[Array, "T O"] = jax.ffi.ffi_call(name, result)(*arguments)
    return sums
