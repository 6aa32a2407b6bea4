"""grouped_matmul for any device XLA compiles for: a loop over pieces of work, as many as there are when it runs.

Each piece is the rows of one expert, times its matrix; what is packed is unpacked for that one expert. XLA's own `ragged_dot` is no
alternative yet: for GPUs and CPUs it is made into one product of all rows with all experts (4 GB of masked rows, and 128 times the arithmetic,
for 4096 rows of 4096 and 128 experts on an H100).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.code_order import code_matrices, in_code_order
from pallas_kernels.grouped_matmul.formats import Fp8, Int4, Weights, shape_of
from pallas_kernels.grouped_matmul.work import num_pieces, piece, tile_for, work_for

_SMALLEST, _LARGEST = 8, 1024  # rows of a tile
_LARGEST_ON_CPU = 64  # measured: more has no faster product, and more rows of other experts in it


def grouped_matmul(x: Float[Array, "T D"], weights: Weights, group_sizes: Int[Array, " E"]) -> Float[Array, "T F"]:
    """See op.py."""
    on_cpu, elsewhere = partial(_in_pieces, largest=_LARGEST_ON_CPU), partial(_in_pieces, largest=_LARGEST)
    return lax.platform_dependent(x, weights, group_sizes, cpu=on_cpu, default=elsewhere)


def _in_pieces(x: Float[Array, "T D"], weights: Weights, group_sizes: Int[Array, " E"], largest: int) -> Float[Array, "T F"]:
    num_rows, (num_experts, _, outputs) = len(x), shape_of(weights)
    tile = min(tile_for(num_rows, num_experts, _SMALLEST, largest), num_rows)
    work = work_for(group_sizes, num_rows, tile)
    inputs = in_code_order(x, weights) if isinstance(weights, Int4 | Fp8) else x

    def one(i: Array, out: Array) -> Array:
        # XLA on a CPU slices no bfloat16: it would make all experts float32 before the loop, if they did not come out of one of its steps.
        i, experts = lax.optimization_barrier((i, weights))
        expert, start, skip, size = piece(work, i, num_rows, tile)
        its_own = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, expert, 1)[0], experts)
        product = _product(lax.dynamic_slice_in_dim(inputs, start, tile), its_own)
        place = jnp.arange(tile)
        is_ours = (place >= skip) & (place < skip + size)
        rows = jnp.where(is_ours[:, None], product.astype(x.dtype), lax.dynamic_slice_in_dim(out, start, tile))
        return lax.dynamic_update_slice_in_dim(out, rows, start, 0)

    return lax.fori_loop(0, num_pieces(work, num_rows, tile)[0], one, jnp.zeros((num_rows, outputs), x.dtype))


def _product(rows: Float[Array, "R ..."], expert: Float[Array, "D F"] | Int4 | Fp8) -> Float[Array, "R F"]:
    if isinstance(expert, Int4 | Fp8):
        return sum((_dot(rows[:, i], matrix, "ri,oi->ro") for i, matrix in enumerate(code_matrices(expert))), jnp.zeros((), jnp.float32))
    return _dot(rows, expert, "ri,io->ro")


def _dot(rows: Float[Array, "R D"], matrix: Float[Array, "..."], equation: str) -> Float[Array, "R F"]:
    narrow = jnp.bfloat16 if jnp.bfloat16 in (rows.dtype, matrix.dtype) else jnp.float32
    # XLA on CPU has no fast product of a single narrow row: two take a fraction of its time.
    pair = jnp.concatenate([rows, rows]) if len(rows) == 1 and narrow == jnp.bfloat16 else rows
    return jnp.einsum(equation, pair.astype(narrow), matrix.astype(narrow), preferred_element_type=jnp.float32)[: len(rows)]
