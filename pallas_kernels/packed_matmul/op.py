"""packed_matmul: rows times a matrix that is packed in the order in which a CPU kernel reads it. XLA's own products on
a CPU read unpacked matrices and reach a third to three quarters of the speed of memory or cores."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.llvm.host import host_target
from pallas_kernels.packed_matmul import llvm_cpu, reference
from pallas_kernels.packed_matmul.layout import GROUP, LANES, packed_dtype

_IMPLEMENTATIONS = {"llvm_cpu": llvm_cpu.packed_matmul, "reference": reference.packed_matmul}


def packed_matmul(
    x: Shaped[Array, "T I"],
    matrices: Shaped[Array, "S P K 16 G"],
    place: Int[Array, ""],
    *,
    backend: Literal["llvm_cpu", "reference"] = "llvm_cpu",
) -> Shaped[Array, "T O"]:
    """x times one of several packed matrices.

    Args:
      x: T rows of I inputs: float32, bfloat16 or int8.
      matrices: S of them, each packed by `layout.pack` from an [O, I] matrix of x's type; uint8 for int8. All are
        passed, and none is copied: XLA would copy a slice.
      place: which of the S, int32.
      backend: 'llvm_cpu' (CPU devices only) or 'reference'.

    Returns [T, O] sums: float32, or int32 for integers. float32 is summed in another order than XLA's. Raises
    `ValueError` for inconsistent shapes or types, and for a processor that lacks the instructions.
    """
    group = GROUP.get(x.dtype.name)
    if group is None or x.ndim != 2 or matrices.dtype != packed_dtype(x.dtype):
        raise ValueError(
            f"packed_matmul: x {x.dtype}{x.shape} must be [T, I] of one of {', '.join(GROUP)}, matrices {matrices.dtype} of the same"
        )
    if matrices.ndim != 5 or matrices.shape[3:] != (LANES, group) or matrices.shape[2] * group != x.shape[1]:
        raise ValueError(
            f"packed_matmul: matrices {matrices.shape} must be [S, O / {LANES}, {x.shape[1] // group}, {LANES}, {group}] for x {x.shape}"
        )
    if place.shape != () or place.dtype != jnp.int32:
        raise ValueError(f"packed_matmul: place {place.dtype}{place.shape} must be one int32")
    if backend == "llvm_cpu" and (reason := unsupported_reason(x.dtype)) is not None:
        raise ValueError(f"packed_matmul: {reason}")  # LLVM would end the process
    return _IMPLEMENTATIONS[backend](x, matrices, place)


def unsupported_reason(dtype: jnp.dtype) -> str | None:
    """Why 'llvm_cpu' can't multiply this type on this machine's processor; None if it can."""
    if dtype.name not in GROUP:
        return f"it has no kernel for {dtype.name}"
    if dtype == jnp.int8 and not host_target().avx512_vnni:
        return "this processor has no AVX-512 VNNI, which its product of integers is made of"
    return None
