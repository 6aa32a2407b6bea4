"""Speed of this processor's products with packed matrices, by type and number of rows, with the engine's kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed_matmul.layout import GROUP, LANES, packed_dtype
from pallas_kernels.packed_matmul.op import packed_matmul, unsupported_reason

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SIZE = 960  # of a square matrix; a power of two would hit cache conflicts
_STACK_BYTES = 3 * 2**26  # of all matrices of a type: more than caches hold, so they come from memory as weights do
_MOST_ROWS_READ = 16  # with more rows, reading matrices matters little, so fewer matrices suffice


@dataclass(frozen=True)
class MatmulChain:
    """A chain of products, each with its own matrix."""

    dtype: str
    num_rows: int
    num_matrices: int
    run: Callable[[], None]


def chains(device: jax.Device) -> list[MatmulChain]:
    """Chains of every type that this processor multiplies, for each number of rows."""
    return [chain for name in GROUP if unsupported_reason(jnp.dtype(name)) is None for chain in _of_type(name, device)]


def rates(of: Sequence[MatmulChain], seconds: Sequence[float]) -> dict[str, dict[int, float]]:
    """Multiplications and additions a second, by type and rows, from the time of each chain; reading the matrices is
    included."""
    found: dict[str, dict[int, float]] = {}
    for chain, taken in zip(of, seconds, strict=True):
        found.setdefault(chain.dtype, {})[chain.num_rows] = 2 * chain.num_rows * chain.num_matrices * _SIZE**2 / taken
    return found


def _of_type(name: str, device: jax.Device) -> Iterator[MatmulChain]:
    """Chains of a type, for each number of rows."""
    dtype, group = jnp.dtype(name), GROUP[name]
    num_matrices = _STACK_BYTES // (_SIZE**2 * dtype.itemsize)
    shape = (num_matrices, _SIZE // LANES, _SIZE // group, LANES, group)
    # Not zeros: the system maps pages of zeros to one physical page, which never leaves the caches.
    value = 1 if dtype == jnp.int8 else 1 / _SIZE
    stack = jax.device_put(np.full(shape, value, packed_dtype(dtype)), device)

    def chain(rows: jax.Array, stack: jax.Array, length: int) -> jax.Array:
        for place in range(length):
            rows = packed_matmul(rows.astype(dtype), stack, jnp.asarray(place, jnp.int32))
        return rows

    for num_rows in ROWS:
        length = max(num_matrices * _MOST_ROWS_READ // max(num_rows, _MOST_ROWS_READ), 3)
        rows = jax.device_put(np.ones((num_rows, _SIZE), np.float32), device)
        program = jax.jit(chain, static_argnums=2).lower(rows, stack, length).compile()
        yield MatmulChain(name, num_rows, length, partial(_call, program, rows, stack))


def _call(program: Callable[..., jax.Array], rows: jax.Array, stack: jax.Array) -> None:
    program(rows, stack).block_until_ready()
