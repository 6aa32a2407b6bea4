"""lossless_matmul in plain jnp, the specification."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.lossless_matmul.layout import unpack


def lossless_matmul(x: BFloat16[Array, "T I"], matrices: UInt8[Array, "S P K B"], place: Int[Array, ""]) -> Float32[Array, "T O"]:
    matrix = unpack(matrices[place])
    return jnp.einsum("ti,oi->to", x.astype(jnp.float32), matrix.astype(jnp.float32), precision="highest")
