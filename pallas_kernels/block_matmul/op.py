"""block_matmul: rows times a matrix that lies in memory in the blocks of a GGUF file.

A step of decode reads every weight once, so a CPU's memory sets its speed, and 4.5 to 8.5 bits a value are less than
16. Weights are not rounded to a float type on the way.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.block_matmul import llvm_cpu, reference
from pallas_kernels.block_matmul.block_types import BlockType
from pallas_kernels.block_matmul.layout import tile_bytes
from pallas_kernels.llvm.host import host_target

TYPES = ("float32", "bfloat16")  # of rows
_IMPLEMENTATIONS = {"llvm_cpu": llvm_cpu.block_matmul, "reference": reference.block_matmul}


def block_matmul(
    x: Float[Array, "T I"],
    matrices: UInt8[Array, "S P K B"],
    place: Int[Array, ""],
    kind: BlockType,
    *,
    is_rounded: bool = False,
    backend: Literal["llvm_cpu", "reference"] = "llvm_cpu",
) -> Float32[Array, "T O"]:
    """x times one of several matrices.

    Args:
      x: T rows of I inputs, float32 or bfloat16.
      matrices: S of them, each packed by `layout.pack` from an [O, I] matrix: P panels of 16 outputs, K blocks of an
        output, B bytes of a tile. All are passed, and none is copied: XLA would copy a slice.
      place: which of the S, int32.
      kind: what the blocks are.
      is_rounded: rows become integers of 16 bits times a unit of the row, which processors with VNNI multiply.
      backend: 'llvm_cpu' (CPU devices only) or 'reference'.

    Returns [T, O] sums in float32; each is of products of a group, which are then scaled. Raises `ValueError` for
    inconsistent shapes or types, and for a processor that lacks the instructions.
    """
    if x.dtype.name not in TYPES or x.ndim != 2 or matrices.dtype != jnp.uint8:
        raise ValueError(f"block_matmul: x {x.dtype}{x.shape} must be [T, I] of {' or '.join(TYPES)}, matrices {matrices.dtype} uint8")
    if matrices.ndim != 4 or matrices.shape[2] * kind.size != x.shape[1] or matrices.shape[3] != tile_bytes(kind):
        raise ValueError(
            f"block_matmul: matrices {matrices.shape} of {kind.name} must be [S, O / 16, I / {kind.size}, {tile_bytes(kind)}] for x {x.shape}"
        )
    if place.shape != () or place.dtype != jnp.int32:
        raise ValueError(f"block_matmul: place {place.dtype}{place.shape} must be one int32")
    if backend == "llvm_cpu" and (reason := unsupported_reason()) is not None:
        raise ValueError(f"block_matmul: {reason}")  # LLVM would end the process
    if backend == "llvm_cpu" and is_rounded and not multiplies_integers():
        raise ValueError("block_matmul: this processor has no AVX-512 VNNI, which rounded rows are multiplied by")
    return _IMPLEMENTATIONS[backend](x, matrices, place, kind, is_rounded=is_rounded)


def multiplies_integers() -> bool:
    """Whether this processor multiplies rows that are rounded to integers."""
    return host_target().avx512 and host_target().avx512_vnni


def unsupported_reason() -> str | None:
    """Why 'llvm_cpu' can't run on this machine's processor; None if it can."""
    return None if host_target().avx2 else "this processor has no AVX2, which its decoding is made of"
