"""block_matmul in plain jnp, the specification."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.block_matmul.block_types import BlockType
from pallas_kernels.block_matmul.layout import unpack


def block_matmul(
    x: Float[Array, "T I"], matrices: UInt8[Array, "S P K B"], place: Int[Array, ""], kind: BlockType, *, is_rounded: bool = False
) -> Float32[Array, "T O"]:
    return jnp.einsum("ti,oi->to", x.astype(jnp.float32), unpack(kind, matrices[place]), precision="highest")
