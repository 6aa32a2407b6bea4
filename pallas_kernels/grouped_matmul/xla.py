"""grouped_matmul for any device XLA compiles for: a loop over pieces of work, as many as there are when it runs.

Each piece is the rows of one expert, times its matrix; what is packed is unpacked to bfloat16 for that one expert. XLA's own `ragged_dot` is no
alternative yet: for GPUs and CPUs it is made into one product of all rows with all experts (4 GB of masked rows, and 128 times the arithmetic,
for 4096 rows of 4096 and 128 experts on an H100).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.grouped_matmul.formats import Weights, dequantised, shape_of
from pallas_kernels.grouped_matmul.work import num_pieces, piece, tile_for, work_for

_SMALLEST, _LARGEST = 8, 1024  # rows of a tile


def grouped_matmul(x: BFloat16[Array, "T D"], weights: Weights, group_sizes: Int[Array, " E"]) -> BFloat16[Array, "T F"]:
    """See op.py."""
    num_rows, (num_experts, _, outputs) = len(x), shape_of(weights)
    tile = min(tile_for(num_rows, num_experts, _SMALLEST, _LARGEST), num_rows)
    work = work_for(group_sizes, num_rows, tile)

    def one(i: Array, out: Array) -> Array:
        expert, start, skip, size = piece(work, i, num_rows, tile)
        matrix = dequantised(jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, expert, 1), weights))[0]
        product = jnp.dot(lax.dynamic_slice_in_dim(x, start, tile), matrix.astype(x.dtype), preferred_element_type=jnp.float32)
        place = jnp.arange(tile)
        is_ours = (place >= skip) & (place < skip + size)
        rows = jnp.where(is_ours[:, None], product.astype(x.dtype), lax.dynamic_slice_in_dim(out, start, tile))
        return lax.dynamic_update_slice_in_dim(out, rows, start, 0)

    return lax.fori_loop(0, num_pieces(work, num_rows, tile)[0], one, jnp.zeros((num_rows, outputs), x.dtype))
