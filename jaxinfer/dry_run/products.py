"""How fast this machine's processor multiplies with packed matrices, by the type and the number of rows: measured with the engine's own kernel."""

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
_SIZE = 960  # of a square matrix; no power of two, which some caches are bad at
_STACK_BYTES = 3 * 2**26  # of all matrices of a type: more than caches hold, so that they are read from memory as a model's are
_MOST_ROWS_READ = 16  # with more of them reading matrices matters little: fewer are multiplied with


@dataclass(frozen=True)
class Chain:
    """Products one after the other, each with a matrix of its own."""

    dtype: str
    num_rows: int
    num_matrices: int
    run: Callable[[], None]


def chains(device: jax.Device) -> list[Chain]:
    """Of all types that can be multiplied here, for each number of rows."""
    return [chain for name in GROUP if unsupported_reason(jnp.dtype(name)) is None for chain in _of_type(name, device)]


def rates(of: Sequence[Chain], seconds: Sequence[float]) -> dict[str, dict[int, float]]:
    """Multiplications and additions a second, by type and rows, of chains that took so long: reading the matrices is part of it."""
    found: dict[str, dict[int, float]] = {}
    for chain, taken in zip(of, seconds, strict=True):
        found.setdefault(chain.dtype, {})[chain.num_rows] = 2 * chain.num_rows * chain.num_matrices * _SIZE**2 / taken
    return found


def _of_type(name: str, device: jax.Device) -> Iterator[Chain]:
    """Of a type, for each number of rows."""
    dtype, group = jnp.dtype(name), GROUP[name]
    num_matrices = _STACK_BYTES // (_SIZE**2 * dtype.itemsize)
    shape = (num_matrices, _SIZE // LANES, _SIZE // group, LANES, group)
    # No zeros: the system keeps pages of those as one, which never leaves the caches.
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
        yield Chain(name, num_rows, length, partial(_call, program, rows, stack))


def _call(program: Callable[..., jax.Array], rows: jax.Array, stack: jax.Array) -> None:
    program(rows, stack).block_until_ready()
