"""packed_matmul in plain jnp, the specification."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.packed_matmul.layout import unpack


def packed_matmul(x: Shaped[Array, "T I"], matrices: Shaped[Array, "S P K 16 G"], place: Int[Array, ""]) -> Shaped[Array, "T O"]:
    matrix = unpack(matrices[place])
    of_sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return jnp.einsum("ti,oi->to", x.astype(of_sums), matrix.astype(of_sums), precision="highest")
