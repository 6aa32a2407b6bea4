"""The GPU's own limits: a large copy, and a large product of random matrices."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.gpu import roofline
from benchmarks.gpu.measure import GpuMeasure, RowResult
from benchmarks.gpu.roofline import DATASHEET, RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes
from benchmarks.gpu.timing import per_call, per_launch

COPY, MATMUL = "copy", "matmul"
_EXPECTED = DATASHEET["h100"]


def measures(sizes: BenchmarkSizes) -> list[GpuMeasure]:
    return [
        GpuMeasure(COPY, "loop", "", lambda: _pass_over(sizes), 60.0),
        GpuMeasure(COPY, "launches", "", lambda: _copy(sizes), 60.0),
        GpuMeasure(MATMUL, "xla", "", lambda: _multiply(sizes), 60.0),
    ]


def _random_words(sizes: BenchmarkSizes) -> tuple[jax.Array, RooflineWork]:
    x = jax.random.bits(jax.random.key(0), (sizes.copied_bytes // 4,), jnp.uint32)
    return x, RooflineWork(2 * x.nbytes, 0)


def _case(x: jax.Array) -> str:
    return f"{x.nbytes / 2**20:g} MiB"


def _pass_over(sizes: BenchmarkSizes) -> Iterator[RowResult]:
    """Changes each number, so that no round can be left out or fused with the next: as many bytes as a copy."""
    x, work = _random_words(sizes)
    times, _ = per_call(lambda x, factor, _: x * factor + 1, x, jnp.uint32(1664525), [None], _EXPECTED.floor(work), sizes.repeats)
    yield RowResult(_case(x), times, work)


def _copy(sizes: BenchmarkSizes) -> Iterator[RowResult]:
    x, work = _random_words(sizes)
    yield RowResult(_case(x), per_launch(lambda: jnp.array(x, copy=True), 8, sizes.repeats), work)


def _multiply(sizes: BenchmarkSizes) -> Iterator[RowResult]:
    size = sizes.matrix_size
    keys = jax.random.split(jax.random.key(0), 3)
    x, *matrices = (jax.random.normal(key, (size, size), sizes.dtype) for key in keys)
    matrices = [(matrix / size**0.5).astype(sizes.dtype) for matrix in matrices]  # products keep x's magnitude
    work = roofline.product(size, size, size, sizes.itemsize)
    times, _ = per_call(lambda x, _, matrix: x @ matrix, x, None, matrices, _EXPECTED.floor(work), sizes.repeats)
    yield RowResult(f"{size} x {size} x {size}", times, work)
