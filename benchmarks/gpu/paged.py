"""paged_attention: one token a request over its pages, in Llama-3.1-8B's shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.pools import random_pages
from benchmarks.gpu.problem import Check, Problem, attention_shape, inputs_in_turns
from benchmarks.gpu.sizes import Sizes
from pallas_kernels.paged_attention import reference

Case = tuple[int, int]  # batch, context


def cases(sizes: Sizes) -> dict[str, Case]:
    return {f"batch {batch}, context {context}": (batch, context) for batch, context in sizes.decode}


def tilings(sizes: Sizes, case: Case) -> list[dict[str, int]]:
    """Tiles of a page's tokens and more, and shares of a context of 128 tokens and more."""
    _, context = case
    if sizes.is_small:
        return [{"tokens": 64, "stages": 2, "splits": 1}]
    splits = [s for s in (1, 2, 4, 8, 16, 32) if context // s >= 128]
    return [
        {"tokens": tokens, "stages": stages, "splits": s}
        for tokens, stages in ((64, 2), (64, 3), (64, 4), (64, 6), (128, 2), (128, 3))
        for s in splits
    ]


def problem(sizes: Sizes, case: Case, seed: int) -> Problem:
    batch, context = case
    work = sizes.decode_attention(batch, context)
    num_inputs = inputs_in_turns(work, sizes)
    random = np.random.default_rng([seed, batch, context])
    kv, table = random_pages(random, np.full(batch, context), num_inputs, sizes, fill=0.0)
    lengths = jnp.full(batch, context, jnp.int32)

    def step(function: Callable[..., Any], q: jax.Array, shared: tuple[jax.Array, ...], layer: jax.Array) -> jax.Array:
        kv, table, lengths = shared
        # Results become queries; this scale keeps the scores of such small ones spread.
        scale = 0.5 * (context / sizes.model.head_size) ** 0.5
        return function(q, kv, layer, table, lengths, scale=scale, pool_is_finite=True)

    # NaN where nothing may be read; or, where the pool is promised finite, what would be seen in a result.
    checks = {name: _check(sizes, case, int(random.integers(2**31)), fill, name == "finite pool") for name, fill in FILLS.items()}
    layers = [jnp.int32(layer) for layer in range(num_inputs)]
    shape = attention_shape(sizes) | {"batch": batch, "context": context}
    return Problem(work, _queries(random, batch, sizes), (kv, table, lengths), layers, step, checks, shape)


FILLS = {"poisoned pool": np.nan, "finite pool": 3e4}


def _check(sizes: Sizes, case: Case, seed: int, fill: float, pool_is_finite: bool) -> Check:
    """Contexts of any length up to the case's, which one has; of several requests one has none."""
    batch, context = case
    random = np.random.default_rng(seed)
    contexts = random.permutation([context, *random.integers(1, context + 1, batch - 1)])
    if batch > 2:
        contexts[np.argmin(contexts)] = 0
    kv, table = random_pages(random, contexts, 2, sizes, fill=fill)
    q = _queries(random, batch, sizes)
    rest = (jnp.int32(1), table, jnp.asarray(contexts, jnp.int32))
    options: dict[str, Any] = {"scale": sizes.model.head_size**-0.5, "pool_is_finite": pool_is_finite}

    def expected() -> np.ndarray:
        # Its own sums are float32 whatever the pool's type is, so bfloat16 numbers are taken as they are.
        wide = jax.jit(partial(reference.paged_attention, **options))(q.astype(jnp.float32), kv, *rest)
        return np.asarray(wide)

    return Check(lambda function, *arguments: function(*arguments, **options), (q, kv, *rest), expected)


def _queries(random: np.random.Generator, batch: int, sizes: Sizes) -> jax.Array:
    shape = (batch, sizes.model.num_heads, sizes.model.head_size)
    return jnp.asarray(random.standard_normal(shape, np.float32), sizes.dtype)
