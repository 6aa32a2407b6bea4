"""paged_attention on a CPU: LLVM compiles the kernel for the host's processor, and XLA's programs call it through
`jax.ffi`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.llvm.host import host_target, register
from pallas_kernels.llvm.page_values import unit
from pallas_kernels.paged_attention import llvm_ir
from pallas_kernels.paged_attention.llvm_tiles import DecodeShape

NAME = "jaxinfer_paged_attention"  # prefix of the custom calls' names; their shape follows


def paged_attention(
    q: Float[Array, "B N H"],
    kv_pages: Float[Array, "L 2 P K G H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    *,
    scale: float,
    pool_is_finite: bool,
) -> Float[Array, "B N H"]:
    """See op.py."""
    del pool_is_finite  # nothing outside a context is read
    batch, num_heads, head_size = q.shape
    num_kv_heads, page_size = kv_pages.shape[3:5]
    value_bytes = kv_pages.dtype.itemsize
    shape = DecodeShape(num_kv_heads, num_heads // num_kv_heads, head_size, page_size, value_bytes)
    name = register(
        f"{NAME}_{num_kv_heads}_{shape.group}_{head_size}_{page_size}_{kv_pages.dtype}", lambda: llvm_ir.module(shape, host_target())
    )
    scratch = llvm_ir.scratch_size(shape, page_table.shape[1] * page_size)
    results = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, scratch), jnp.float32),
    )
    scaled = q.astype(jnp.float32) * (scale * unit(value_bytes))
    layer, page_table, kv_len = (jnp.asarray(a, jnp.int32) for a in (layer, page_table, kv_len))
    out: Float[Array, "B N H"] = jax.ffi.ffi_call(name, results)(scaled, kv_pages, layer, page_table, kv_len)[0]
    return out.astype(q.dtype)
