"""grouped_matmul for any device XLA compiles for: a loop over pieces of work, as many as there are at run time.

Each piece is the rows of one expert, times its matrix. Packed weights are unpacked for that one expert. XLA's own
`ragged_dot` is no alternative yet: for GPUs and CPUs XLA makes one product of all rows with all experts (4 GB of masked
rows and 128 times the arithmetic, for 4096 rows of 4096 and 128 experts on an H100).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.code_order import code_matrices, to_code_order
from pallas_kernels.grouped_matmul.formats import Fp8, Int4, Weights, dequantise, expert_shape
from pallas_kernels.grouped_matmul.lossless import LosslessWeights
from pallas_kernels.grouped_matmul.row_pieces import num_pieces, piece, piece_bounds, tile_for

_MIN_TILE_ROWS, _MAX_TILE_ROWS = 8, 1024  # rows of a tile
_MAX_TILE_ROWS_ON_CPU = 64  # measured: larger tiles are no faster, and hold more rows of other experts


def grouped_matmul(x: Float[Array, "T D"], weights: Weights, group_sizes: Int[Array, " E"]) -> Float[Array, "T F"]:
    """See op.py."""
    if isinstance(weights, LosslessWeights) and expert_shape(weights)[0] == 1:  # no piece of work needs a loop
        return _of_one(x, dequantise(weights)[0], group_sizes)
    on_cpu, elsewhere = partial(_in_pieces, largest=_MAX_TILE_ROWS_ON_CPU), partial(_in_pieces, largest=_MAX_TILE_ROWS)
    return lax.platform_dependent(x, weights, group_sizes, cpu=on_cpu, default=elsewhere)


def _in_pieces(x: Float[Array, "T D"], weights: Weights, group_sizes: Int[Array, " E"], largest: int) -> Float[Array, "T F"]:
    num_rows, (num_experts, _, outputs) = len(x), expert_shape(weights)
    tile = min(tile_for(num_rows, num_experts, _MIN_TILE_ROWS, largest), num_rows)
    work = piece_bounds(group_sizes, num_rows, tile)
    inputs = to_code_order(x, weights) if isinstance(weights, Int4 | Fp8) else x

    def one(i: Array, out: Array) -> Array:
        # XLA on a CPU slices no bfloat16: it would convert all experts to float32 before the loop unless they are
        # carried through a step.
        i, experts = lax.optimization_barrier((i, weights))
        expert, start, skip, size = piece(work, i, num_rows, tile)
        its_own = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, expert, 1)[0], experts)
        product = _product(lax.dynamic_slice_in_dim(inputs, start, tile), its_own)
        place = jnp.arange(tile)
        is_ours = (place >= skip) & (place < skip + size)
        rows = jnp.where(is_ours[:, None], product.astype(x.dtype), lax.dynamic_slice_in_dim(out, start, tile))
        return lax.dynamic_update_slice_in_dim(out, rows, start, 0)

    return lax.fori_loop(0, num_pieces(work, num_rows, tile)[0], one, jnp.zeros((num_rows, outputs), x.dtype))


def _of_one(x: Float[Array, "T D"], matrix: Float[Array, "D F"], group_sizes: Int[Array, " 1"]) -> Float[Array, "T F"]:
    """All rows times one matrix, which XLA multiplies by a library's product."""
    product = _dot(x, matrix, "ri,io->ro").astype(x.dtype)
    return jnp.where(jnp.arange(len(x))[:, None] < group_sizes[0], product, 0)


def _product(rows: Float[Array, "R ..."], expert: Float[Array, "D F"] | Int4 | Fp8 | LosslessWeights) -> Float[Array, "R F"]:
    if isinstance(expert, LosslessWeights):
        return _dot(rows, dequantise(LosslessWeights(expert.tiles[None]))[0], "ri,io->ro")
    if isinstance(expert, Int4 | Fp8):
        return sum((_dot(rows[:, i], matrix, "ri,oi->ro") for i, matrix in enumerate(code_matrices(expert))), jnp.zeros((), jnp.float32))
    return _dot(rows, expert, "ri,io->ro")


def _dot(rows: Float[Array, "R D"], matrix: Float[Array, "..."], equation: str) -> Float[Array, "R F"]:
    narrow = jnp.bfloat16 if jnp.bfloat16 in (rows.dtype, matrix.dtype) else jnp.float32
    # XLA on CPU has no fast product of a single bfloat16 row: two rows need a fraction of its time.
    pair = jnp.concatenate([rows, rows]) if len(rows) == 1 and narrow == jnp.bfloat16 else rows
    return jnp.einsum(equation, pair.astype(narrow), matrix.astype(narrow), preferred_element_type=jnp.float32)[: len(rows)]
