"""How fast this machine's processor multiplies with packed matrices, by the type and the number of rows: measured with the engine's own kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed_matmul.layout import GROUP, LANES, packed_dtype
from pallas_kernels.packed_matmul.op import packed_matmul, why_not

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SIZE = 1024  # of a square matrix
_STACK_BYTES = 3 * 2**26  # of all matrices of a type: more than caches hold, so that they are read from memory as a model's are
_LEAST_SECONDS = 0.02  # of a measurement


def measure_products(device: jax.Device, num_rounds: int = 5) -> dict[str, dict[int, float]]:
    """Multiplications and additions a second, by type and rows: reading the matrices is part of it. Only types that can be multiplied here."""
    calls = {
        (name, rows): (call, num_matrices)
        for name in GROUP
        if why_not(jnp.dtype(name)) is None
        for num_matrices, of_rows in [_calls(name, device)]
        for rows, call in of_rows.items()
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(num_rounds):  # in turns, so that what else the machine does meets all of them alike
        for key, (call, _) in calls.items():
            best[key] = min(best[key], _seconds(call))
    found: dict[str, dict[int, float]] = {}
    for (name, rows), (_, num_matrices) in calls.items():
        found.setdefault(name, {})[rows] = 2 * rows * num_matrices * _SIZE**2 / best[name, rows]
    return found


def _calls(name: str, device: jax.Device) -> tuple[int, dict[int, Callable[[], Any]]]:
    """Of a type, the number of matrices and for each number of rows a chain of products with them all."""
    dtype, group = jnp.dtype(name), GROUP[name]
    num_matrices = _STACK_BYTES // (_SIZE**2 * dtype.itemsize)
    shape = (num_matrices, _SIZE // LANES, _SIZE // group, LANES, group)
    stack = jax.device_put(np.zeros(shape, packed_dtype(dtype)), device)

    def chain(rows: jax.Array, stack: jax.Array) -> jax.Array:
        for place in range(num_matrices):
            rows = packed_matmul(rows.astype(dtype), stack, jnp.asarray(place, jnp.int32))
        return rows

    def call(num_rows: int) -> Callable[[], Any]:
        rows = jax.device_put(np.ones((num_rows, _SIZE), np.float32), device)
        program = jax.jit(chain).lower(rows, stack).compile()
        return lambda: program(rows, stack).block_until_ready()

    return num_matrices, {num_rows: call(num_rows) for num_rows in ROWS}


def _seconds(call: Callable[[], Any]) -> float:
    """Of one of as many calls as take long enough to be told, the quickest."""
    began, best = time.perf_counter(), float("inf")
    while (now := time.perf_counter()) - began < _LEAST_SECONDS or best == float("inf"):
        call()
        best = min(best, time.perf_counter() - now)
    return best
