"""ragged_prefill_attention on a CPU: LLVM compiles the kernel for the host's processor, and XLA's programs call it
through `jax.ffi`. The pool is passed whole, and is only read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.llvm.host import host_target, register
from pallas_kernels.ragged_prefill_attention import llvm_ir
from pallas_kernels.ragged_prefill_attention.llvm_ir import PrefillShape, tile_size

NAME = "jaxinfer_ragged_prefill_attention"  # prefix of the custom calls' names; their shape follows


def ragged_prefill_attention(
    q: Float[Array, "T N H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "R W"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    kv_len: Int[Array, " R"],
    *,
    scale: float,
    query_tile: int,
    pool_is_finite: bool,
) -> Float[Array, "T N H"]:
    """See op.py."""
    del pool_is_finite  # nothing outside a context is read
    num_kv_heads, page_size, head_size = kv_pages.shape[3:]
    group = q.shape[1] // num_kv_heads
    shape = PrefillShape(head_size, group, page_size, query_tile, tile_size(query_tile, group, head_size), scale, kv_pages.dtype.itemsize)
    name = register(
        f"{NAME}_{head_size}_{group}_{page_size}_{query_tile}_{scale:.9g}_{kv_pages.dtype}", lambda: llvm_ir.module(shape, host_target())
    )
    numbers = (jnp.asarray(a, jnp.int32) for a in (layer, page_table, query_start, query_len, kv_len))
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    out: Float[Array, "T N H"] = call(q.astype(jnp.float32), kv_pages, *numbers)
    return out.astype(q.dtype)
