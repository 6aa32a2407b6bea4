"""JAX's own attention, cuDNN's, over contiguous keys and values without pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import paged_attention, ragged_prefill_attention
from benchmarks.gpu.kernels import measure_function
from benchmarks.gpu.measure import GpuMeasure, RowResult
from benchmarks.gpu.problem import KernelCheck, Problem, interleaved_inputs, only_if_finite
from benchmarks.gpu.roofline import RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes

_LIMIT_S = 60.0


def measures(sizes: BenchmarkSizes, seed: int) -> list[GpuMeasure]:
    """In the small sizes XLA's attention replaces it: a CPU has no cuDNN."""
    way = f"jax {_implementation(sizes)}"
    return [
        *(
            GpuMeasure(
                "paged_attention",
                way,
                case,
                partial(_measure, sizes, case, sizes.decode_attention(*about), (about[0], 1, about[1]), seed),
                _LIMIT_S,
            )
            for case, about in paged_attention.plain_cases(sizes).items()
        ),
        *(
            GpuMeasure(
                "ragged_prefill_attention",
                way,
                case,
                partial(_measure, sizes, case, sizes.prefill_attention(about), (1, about, about), seed),
                _LIMIT_S,
            )
            for case, about in ragged_prefill_attention.plain_cases(sizes).items()
        ),
    ]


def _implementation(sizes: BenchmarkSizes) -> Literal["xla", "cudnn"]:
    return "xla" if sizes.is_small else "cudnn"


def _measure(sizes: BenchmarkSizes, case: str, work: RooflineWork, shape: tuple[int, int, int], seed: int) -> Iterator[RowResult]:
    batch, queries, context = shape
    # The last query sees everything: a single query needs no mask.
    attend = partial(jax.nn.dot_product_attention, is_causal=queries > 1, implementation=_implementation(sizes))
    yield measure_function(attend, _problem(sizes, work, batch, queries, context, seed), sizes, case, {})


def _problem(sizes: BenchmarkSizes, work: RooflineWork, batch: int, queries: int, context: int, seed: int) -> Problem:
    model, num_inputs = sizes.model, interleaved_inputs(work, sizes)
    make = jax.jit(partial(jax.random.normal, dtype=sizes.dtype), static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 2 * num_inputs + 1))
    q = make(next(keys), (batch, queries, model.num_heads, model.head_size))
    shape = (batch, context, model.num_kv_heads, model.head_size)
    inputs = [(make(next(keys), shape), make(next(keys), shape)) for _ in range(num_inputs)]

    def step(function: Callable[..., Any], q: jax.Array, _: None, own: Any) -> jax.Array:
        return function(q, *own, scale=0.2 * (context / model.head_size) ** 0.5)

    # of the queries: the plain implementation's memory for all of them is quadratic
    first = jnp.arange(min(queries, 32))

    def expected() -> np.ndarray:
        k, v = (a[:, : len(first)] if queries > 1 else a for a in inputs[0])
        wide = (a.astype(jnp.float32) for a in (q[:, first], k, v))
        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.nn.dot_product_attention(*wide, is_causal=queries > 1, implementation="xla"))

    def run(function: Callable[..., Any], *arguments: jax.Array) -> jax.Array:
        out = function(*arguments)
        return only_if_finite(out[:, first], out)

    check = KernelCheck(run, (q, *inputs[0]), expected)
    return Problem(work, q, None, inputs, step, {"random inputs": check}, {})
