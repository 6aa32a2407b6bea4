"""packed_matmul on a CPU: LLVM compiles the kernel for the host's processor, and XLA's programs call it through
`jax.ffi`."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.llvm.host import host_target, register
from pallas_kernels.packed_matmul import llvm_ir
from pallas_kernels.packed_matmul.layout import LANES

NAME = "jaxinfer_packed_matmul"  # prefix of the custom calls' names; their kind follows


def packed_matmul(x: Shaped[Array, "T I"], matrices: Shaped[Array, "S P K 16 G"], place: Int[Array, ""]) -> Shaped[Array, "T O"]:
    """See op.py."""
    kind = cast(llvm_ir.Kind, x.dtype.name)
    name = register(f"{NAME}_{kind}", lambda: llvm_ir.module(kind, host_target()))
    of_sums = jnp.int32 if kind == "int8" else jnp.float32
    result = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[1] * LANES), of_sums)
    sums: Shaped[Array, "T O"] = jax.ffi.ffi_call(name, result)(x, matrices, place)
    return sums
