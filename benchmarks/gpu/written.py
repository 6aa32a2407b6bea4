"""write_and_attend: decode attention with the write of the new token's keys and values before it, in Llama-3.1-8B's shape. The write as a launch of
XLA's that also makes the keys, as in the engine, or in attention's own: both in the same inputs, and both tried by the tuner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import paged
from benchmarks.gpu.floors import Work
from benchmarks.gpu.paged import Case
from benchmarks.gpu.pools import random_pages
from benchmarks.gpu.problem import Check, Problem, inputs_in_turns
from benchmarks.gpu.sizes import Sizes
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.mosaic_tiling import tiling_for

_BATCHES = (1, 4, 32)  # that are measured: a step that is mostly launches, and one that is mostly bytes
Tiling = dict[str, int]


def all_cases(sizes: Sizes) -> dict[str, Case]:
    """As many as paged.py has: what is tuned here takes the place of what is tuned there."""
    return {name: case for name, case in paged.cases(sizes).items() if name in paged.plain_cases(sizes)}


def cases(sizes: Sizes) -> dict[str, Case]:
    return {name: case for name, case in all_cases(sizes).items() if case.batch in _BATCHES}


def work(case: Case) -> Work:
    """The new numbers come and go once more."""
    new = 2 * case.batch * case.shape.num_kv_heads * case.shape.head_size
    return case.work + Work(2 * new * jnp.dtype(case.shape.dtype).itemsize, 0)


def tilings(sizes: Sizes, case: Case) -> list[Tiling]:
    return [tiling | {"writes": writes} for tiling in paged.tilings(sizes, case) for writes in (False, True)]


def _as_derived(sizes: Sizes, case: Case, *, writes: bool) -> Tiling:
    shape, dtype = case.shape, jnp.dtype(case.shape.dtype)
    group, context = case.num_heads // shape.num_kv_heads, -(-case.context // shape.page_size) * shape.page_size
    tiling = tiling_for(case.batch, shape.num_kv_heads, group, shape.head_size, shape.page_size, context, dtype, is_written=False)
    return asdict(replace(tiling, writes=writes))


VERSIONS = {"separate": partial(_as_derived, writes=False), "one launch": partial(_as_derived, writes=True)}


def problem(sizes: Sizes, case: Case, seed: int) -> Problem:
    """The pool goes from call to call, as from layer to layer: it is written to."""
    num_inputs = inputs_in_turns(case.work, sizes)
    random = np.random.default_rng([seed, case.batch, case.context])
    contexts = np.full(case.batch, case.context)
    kv, table = random_pages(random, contexts, num_inputs, case.shape, fill=0.0)
    q, new = _rows(random, case, case.num_heads), _rows(random, case, 2 * case.shape.num_kv_heads)
    scale = 0.5 * math.sqrt(case.context / case.shape.head_size)  # see paged.py

    def step(function: Callable[..., Any], carry: tuple[jax.Array, jax.Array], shared: tuple[Any, ...], layer: jax.Array) -> Any:
        (q, kv), (new, *where) = carry, shared
        k, v = jnp.split(new + q[:, : new.shape[1]], 2, axis=1)  # something to compute, as there is in a layer
        return function(q, k, v, kv, layer, *where, scale=scale, pool_is_finite=True)

    fills = {"poisoned pool": np.nan, "finite pool": 3e4}
    checks = {name: _check(case, int(random.integers(2**31)), fill, name == "finite pool") for name, fill in fills.items()}
    layers = [jnp.int32(layer) for layer in range(num_inputs)]
    return Problem(work(case), (q, kv), (new, *_where(table, contexts, case)), layers, step, checks, paged.shape_of(case))


def _check(case: Case, seed: int, fill: float, pool_is_finite: bool) -> Check:
    """Contexts as in paged.py, whose last tokens aren't in the pool yet. What is compared is the result, and what then lies at their places."""
    random = np.random.default_rng(seed)
    contexts = paged.some_contexts(random, case)
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
        # NaN where any other place but the null page's has changed, by a bit.
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

    return Check(run, (q, k, v, kv), expected)


def _where(table: jax.Array, contexts: np.ndarray, case: Case) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Page table, pages and offsets of the last tokens, and lengths; of a row without context the null page."""
    last = np.maximum(contexts - 1, 0)
    page_ids = jnp.where(contexts > 0, table[np.arange(len(contexts)), last // case.shape.page_size], 0)
    return table, page_ids, jnp.asarray(last % case.shape.page_size, jnp.int32), jnp.asarray(contexts, jnp.int32)


def _rows(random: np.random.Generator, case: Case, num_heads: int) -> jax.Array:
    return jnp.asarray(random.standard_normal((case.batch, num_heads, case.shape.head_size), np.float32), case.shape.dtype)
