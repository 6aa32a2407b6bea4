"""write_and_attend: decode attention after the write of the new token's keys and values, in Llama-3.1-8B's shape.
Either XLA's launch that rotates the keys also writes them, as in the engine, or attention's own launch does. Both run
on the same inputs, and the tuner tries both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import paged_attention
from benchmarks.gpu.paged_attention import DecodeBenchmarkCase
from benchmarks.gpu.problem import KernelCheck, Problem, interleaved_inputs
from benchmarks.gpu.random_pages import random_pages
from benchmarks.gpu.roofline import RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.mosaic_tiling import tiling_for

_BATCHES = (1, 4, 32)  # measured batches: one step is mostly launches, one is mostly bytes
Tiling = dict[str, int]


def all_cases(sizes: BenchmarkSizes) -> dict[str, DecodeBenchmarkCase]:
    """As many cases as paged_attention.py has: a tiling that is tuned here replaces the one that is tuned there."""
    return {name: case for name, case in paged_attention.cases(sizes).items() if name in paged_attention.plain_cases(sizes)}


def cases(sizes: BenchmarkSizes) -> dict[str, DecodeBenchmarkCase]:
    return {name: case for name, case in all_cases(sizes).items() if case.batch in _BATCHES}


def work(case: DecodeBenchmarkCase) -> RooflineWork:
    """The new numbers are read and written once more."""
    new = 2 * case.batch * case.shape.num_kv_heads * case.shape.head_size
    return case.work + RooflineWork(2 * new * jnp.dtype(case.shape.dtype).itemsize, 0)


def tilings(sizes: BenchmarkSizes, case: DecodeBenchmarkCase) -> list[Tiling]:
    return [tiling | {"writes": writes} for tiling in paged_attention.tilings(sizes, case) for writes in (False, True)]


def _as_derived(sizes: BenchmarkSizes, case: DecodeBenchmarkCase, *, writes: bool) -> Tiling:
    shape, dtype = case.shape, jnp.dtype(case.shape.dtype)
    group, context = case.num_heads // shape.num_kv_heads, -(-case.context // shape.page_size) * shape.page_size
    tiling = tiling_for(case.batch, shape.num_kv_heads, group, shape.head_size, shape.page_size, context, dtype, is_written=False)
    return asdict(replace(tiling, writes=writes))


VERSIONS = {"separate": partial(_as_derived, writes=False), "one launch": partial(_as_derived, writes=True)}


def problem(sizes: BenchmarkSizes, case: DecodeBenchmarkCase, seed: int) -> Problem:
    """The pool is carried from call to call, as from layer to layer: it is written to."""
    num_inputs = interleaved_inputs(case.work, sizes)
    random = np.random.default_rng([seed, case.batch, case.context])
    contexts = np.full(case.batch, case.context)
    kv, table = random_pages(random, contexts, num_inputs, case.shape, fill=0.0)
    q, new = _rows(random, case, case.num_heads), _rows(random, case, 2 * case.shape.num_kv_heads)
    scale = 0.5 * math.sqrt(case.context / case.shape.head_size)  # see paged_attention.py

    def step(function: Callable[..., Any], carry: tuple[jax.Array, jax.Array], shared: tuple[Any, ...], layer: jax.Array) -> Any:
        (q, kv), (new, *where) = carry, shared
        k, v = jnp.split(new + q[:, : new.shape[1]], 2, axis=1)  # something to compute, as in a layer
        return function(q, k, v, kv, layer, *where, scale=scale, pool_is_finite=True)

    fills = {"poisoned pool": np.nan, "finite pool": 3e4}
    checks = {name: _check(case, int(random.integers(2**31)), fill, name == "finite pool") for name, fill in fills.items()}
    layers = [jnp.int32(layer) for layer in range(num_inputs)]
    return Problem(work(case), (q, kv), (new, *_where(table, contexts, case)), layers, step, checks, paged_attention.shape_of(case))


def _check(case: DecodeBenchmarkCase, seed: int, fill: float, pool_is_finite: bool) -> KernelCheck:
    """Contexts as in paged_attention.py, whose last tokens aren't in the pool yet. The result is compared, and then the
    contents of their slots."""
    random = np.random.default_rng(seed)
    contexts = paged_attention.some_contexts(random, case)
    kv, table = random_pages(random, contexts, 2, case.shape, fill=fill)
    layer, (table, page_ids, offsets, lengths) = jnp.int32(1), _where(table, contexts, case)
    kv = kv.at[layer, :, page_ids, :, offsets].set(fill)
    rows = _rows(random, case, case.num_heads + 2 * case.shape.num_kv_heads)
    q, k, v = jnp.split(rows, (case.num_heads, case.num_heads + case.shape.num_kv_heads), axis=1)

    def run(function: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array) -> jax.Array:
        scale = case.shape.head_size**-0.5
        out, after = function(q, k, v, kv, layer, table, page_ids, offsets, lengths, scale=scale, pool_is_finite=pool_is_finite)
        written = after[layer, :, page_ids, :, offsets].reshape(case.batch, -1, case.shape.head_size)
        both = jnp.where(lengths[:, None, None] > 0, jnp.concatenate([out, written.astype(out.dtype)], axis=1), 0)
        # NaN where any other slot, except the null page's, has changed by a bit.
        bits = jnp.dtype(f"uint{8 * kv.dtype.itemsize}")
        restored = after.at[layer, :, page_ids, :, offsets].set(kv[layer, :, page_ids, :, offsets])
        is_same = jax.lax.bitcast_convert_type(restored, bits) == jax.lax.bitcast_convert_type(kv, bits)
        return jnp.where(is_same[:, :, 1:].all(), both, jnp.nan)

    def expected() -> np.ndarray:
        def plainly(q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, *where: Any, **options: Any) -> Any:
            layer, table, page_ids, offsets, lengths = where
            after = write(kv, layer, (k, v), page_ids, offsets)
            return reference.paged_attention(q.astype(jnp.float32), after, layer, table, lengths, **options), after

        return np.asarray(jax.jit(partial(run, plainly))(q, k, v, kv))

    return KernelCheck(run, (q, k, v, kv), expected)


def _where(table: jax.Array, contexts: np.ndarray, case: DecodeBenchmarkCase) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Page table, pages and offsets of the last tokens, and lengths; the null page for a row without context."""
    last = np.maximum(contexts - 1, 0)
    page_ids = jnp.where(contexts > 0, table[np.arange(len(contexts)), last // case.shape.page_size], 0)
    return table, page_ids, jnp.asarray(last % case.shape.page_size, jnp.int32), jnp.asarray(contexts, jnp.int32)


def _rows(random: np.random.Generator, case: DecodeBenchmarkCase, num_heads: int) -> jax.Array:
    return jnp.asarray(random.standard_normal((case.batch, num_heads, case.shape.head_size), np.float32), case.shape.dtype)
