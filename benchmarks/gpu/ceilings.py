"""What the card itself does: a large copy, a large product of random matrices."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.gpu import floors
from benchmarks.gpu.floors import DATASHEET, Work
from benchmarks.gpu.measure import Found, Measure
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import per_call, per_launch

COPY, MATMUL = "copy", "matmul"
_EXPECTED = DATASHEET["h100"]


def measures(sizes: Sizes) -> list[Measure]:
    return [
        Measure(COPY, "loop", "", lambda: _pass_over(sizes), 60.0),
        Measure(COPY, "launches", "", lambda: _copy(sizes), 60.0),
        Measure(MATMUL, "xla", "", lambda: _multiply(sizes), 60.0),
    ]


def _random_words(sizes: Sizes) -> tuple[jax.Array, Work]:
    x = jax.random.bits(jax.random.key(0), (sizes.copied_bytes // 4,), jnp.uint32)
    return x, Work(2 * x.nbytes, 0)


def _case(x: jax.Array) -> str:
    return f"{x.nbytes / 2**20:g} MiB"


def _pass_over(sizes: Sizes) -> Iterator[Found]:
    """Something new of each number, so that no round can be left out or made one with the next: as many bytes as a copy."""
    x, work = _random_words(sizes)
    times, _ = per_call(lambda x, factor, _: x * factor + 1, x, jnp.uint32(1664525), [None], _EXPECTED.floor(work), sizes.repeats)
    yield Found(_case(x), times, work)


def _copy(sizes: Sizes) -> Iterator[Found]:
    x, work = _random_words(sizes)
    yield Found(_case(x), per_launch(lambda: jnp.array(x, copy=True), 8, sizes.repeats), work)


def _multiply(sizes: Sizes) -> Iterator[Found]:
    size = sizes.matrix_size
    keys = jax.random.split(jax.random.key(0), 3)
    x, *matrices = (jax.random.normal(key, (size, size), sizes.dtype) for key in keys)
    matrices = [(matrix / size**0.5).astype(sizes.dtype) for matrix in matrices]  # products stay of x's size
    work = floors.product(size, size, size, sizes.itemsize)
    times, _ = per_call(lambda x, _, matrix: x @ matrix, x, None, matrices, _EXPECTED.floor(work), sizes.repeats)
    yield Found(f"{size} x {size} x {size}", times, work)
