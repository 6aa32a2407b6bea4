"""lossless_matmul: rows times a matrix of bfloat16 that lies in memory in 12 bits a value, without loss.

A step of decode reads every weight once, so a CPU's memory sets its speed; this reads a quarter less. The products are
those of `packed_matmul` with bfloat16, bit by bit.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.llvm.host import host_target
from pallas_kernels.lossless_matmul import layout, llvm_cpu, reference
from pallas_kernels.lossless_matmul.layout import GROUP, tile_bytes

_IMPLEMENTATIONS = {"llvm_cpu": llvm_cpu.lossless_matmul, "reference": reference.lossless_matmul}
_PACKERS = {"llvm_cpu": llvm_cpu.pack_tiles, "reference": layout.pack_tiles_plainly}


def lossless_matmul(
    x: BFloat16[Array, "T I"],
    matrices: UInt8[Array, "S P K B"],
    place: Int[Array, ""],
    *,
    backend: Literal["llvm_cpu", "reference"] = "llvm_cpu",
) -> Float32[Array, "T O"]:
    """x times one of several packed matrices.

    Args:
      x: T rows of I inputs, bfloat16.
      matrices: S of them, each packed by `pack` from an [O, I] matrix: P panels of 16 outputs, K tiles of a panel, B
        bytes of a tile. All are passed, and none is copied: XLA would copy a slice.
      place: which of the S, int32.
      backend: 'llvm_cpu' (CPU devices only) or 'reference'.

    Returns [T, O] sums in float32. Raises `ValueError` for inconsistent shapes or types, and for a processor that lacks
    the instructions.
    """
    if x.dtype != jnp.bfloat16 or x.ndim != 2 or matrices.dtype != jnp.uint8:
        raise ValueError(f"lossless_matmul: x {x.dtype}{x.shape} must be [T, I] of bfloat16, matrices {matrices.dtype} uint8")
    num_tiles = matrices.shape[2] if matrices.ndim == 4 else 0
    if num_tiles == 0 or x.shape[1] % (num_tiles * GROUP) or matrices.shape[3] != tile_bytes(x.shape[1] // num_tiles // GROUP):
        raise ValueError(
            f"lossless_matmul: matrices {matrices.shape} must be [S, O / 16, K, bytes of {x.shape[1]} / K inputs] for x {x.shape}"
        )
    if place.shape != () or place.dtype != jnp.int32:
        raise ValueError(f"lossless_matmul: place {place.dtype}{place.shape} must be one int32")
    _check(backend)
    return _IMPLEMENTATIONS[backend](x, matrices, place)


def pack(
    matrix: BFloat16[Array, "*O_and_I"],
    output_axes: int = 1,
    num_shards: int = 1,
    *,
    backend: Literal["llvm_cpu", "reference"] = "llvm_cpu",
) -> UInt8[Array, "*P K B"]:
    """See `layout.pack`; 'llvm_cpu' uses all cores. `num_shards`: over how many devices inputs may be split, each with
    whole tiles."""
    _check(backend)
    return layout.pack(matrix, output_axes, num_shards, _PACKERS[backend])


def unsupported_reason() -> str | None:
    """Why 'llvm_cpu' can't run on this machine's processor; None if it can."""
    return None if host_target().avx2 else "this processor has no AVX2, which its decoding is made of"


def _check(backend: str) -> None:
    if backend == "llvm_cpu" and (reason := unsupported_reason()) is not None:
        raise ValueError(f"lossless_matmul: {reason}")  # LLVM would end the process
