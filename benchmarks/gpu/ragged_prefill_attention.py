"""ragged_prefill_attention: a prompt's tokens over themselves, in Llama-3.1-8B's shape, and a few after a long cached
prefix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.problem import KernelCheck, Problem, interleaved_inputs, only_if_finite
from benchmarks.gpu.random_pages import PageShape, random_pages
from benchmarks.gpu.sizes import BenchmarkSizes
from pallas_kernels.ragged_prefill_attention import reference

_QUERY_TILE = 32  # as in the engine's programs
_RAGGED_TOKENS = 512  # of a step of several requests
_MAX_PREFIX_TOKENS = 300
_QUESTION = 32  # tokens, after a long conversation
_NUM_SAMPLES = 4  # query tiles of a long prompt that the reference computes, the last among them


@dataclass(frozen=True)
class BenchmarkPrompt:
    """Its new tokens, and those before them that are cached."""

    num_new: int
    num_cached: int = 0

    @property
    def context(self) -> int:
        return self.num_cached + self.num_new


def plain_cases(sizes: BenchmarkSizes) -> dict[str, int]:
    """Tokens of prompts without a cached prefix: the cases that other implementations support."""
    return {f"{num_tokens} tokens": num_tokens for num_tokens in sizes.prefill}


def cases(sizes: BenchmarkSizes) -> dict[str, BenchmarkPrompt]:
    found = {name: BenchmarkPrompt(num_tokens) for name, num_tokens in plain_cases(sizes).items()}
    longest = max(sizes.prefill)
    return found | {f"{_QUESTION} tokens after {longest}": BenchmarkPrompt(_QUESTION, longest)}


def tilings(sizes: BenchmarkSizes, case: BenchmarkPrompt) -> list[dict[str, int]]:
    """Tiles with 1, 2 or 4 of the heads that share a KV head, and as many tokens as fit in shared memory twice."""
    return [
        {"heads": heads, "tokens": tokens, "stages": stages}
        for heads in (1, 2, 4)
        for tokens, stages in ((64, 2), (64, 4), (64, 6), (128, 2), (128, 3))
    ]


def problem(sizes: BenchmarkSizes, prompt: BenchmarkPrompt, seed: int) -> Problem:
    num_tokens = prompt.num_new
    work = sizes.prefill_attention(num_tokens, prompt.num_cached)
    num_inputs = interleaved_inputs(work, sizes)
    random = np.random.default_rng([seed, prompt.context])
    kv, table = random_pages(random, np.asarray([prompt.context]), num_inputs, _pages(sizes), fill=0.0)
    row = tuple(jnp.asarray([value], jnp.int32) for value in (0, num_tokens, prompt.context))

    def step(function: Callable[..., Any], q: jax.Array, shared: Any, layer: jax.Array) -> jax.Array:
        kv, table, row = shared
        # Results become queries; this scale keeps the scores of such small queries spread.
        scale = 0.2 * (prompt.context / sizes.model.head_size) ** 0.5
        return function(q, kv, layer, table, *row, scale=scale, query_tile=query_tile(num_tokens), pool_is_finite=True)

    checks = {
        "several requests": _several_requests(sizes, min(num_tokens, _RAGGED_TOKENS), int(random.integers(2**31))),
        "one prompt": _one_prompt(sizes, prompt, int(random.integers(2**31))),
    }
    layers = [jnp.int32(layer) for layer in range(num_inputs)]
    shape = asdict(_pages(sizes)) | {"num_heads": sizes.model.num_heads, "tokens": num_tokens}
    return Problem(work, _queries(random, num_tokens, sizes), (kv, table, row), layers, step, checks, shape)


def _several_requests(sizes: BenchmarkSizes, num_tokens: int, seed: int) -> KernelCheck:
    """Runs of any length that start at tiles, each after a prefix of any length. Some tokens belong to no request.
    Slots that no request may read are NaN."""
    random = np.random.default_rng(seed)
    tile = query_tile(num_tokens)
    starts = np.sort(random.choice(np.arange(1, num_tokens // tile), min(3, num_tokens // tile - 1), replace=False)) * tile
    starts = np.concatenate([[0], starts])
    query_len = random.integers(1, np.diff([*starts, num_tokens]) + 1)
    kv_len = query_len + random.integers(0, _MAX_PREFIX_TOKENS, len(query_len))
    starts, query_len, kv_len = (np.append(values, 0) for values in (starts, query_len, kv_len))  # an unused row
    kv, table = random_pages(random, kv_len, 2, _pages(sizes), fill=np.nan)
    q = _queries(random, num_tokens, sizes)
    rest = (jnp.int32(1), table, *(jnp.asarray(values, jnp.int32) for values in (starts, query_len, kv_len)))
    options: dict[str, Any] = {"scale": sizes.model.head_size**-0.5, "query_tile": tile, "pool_is_finite": False}
    arguments = (q, kv, *rest)
    return KernelCheck(lambda function, *arguments: function(*arguments, **options), arguments, lambda: _expected(*arguments, **options))


def _one_prompt(sizes: BenchmarkSizes, prompt: BenchmarkPrompt, seed: int) -> KernelCheck:
    """A few tiles of its queries, as rows of their own: the reference gathers the context for each query."""
    random, num_tokens = np.random.default_rng(seed), prompt.num_new
    kv, table = random_pages(random, np.asarray([prompt.context]), 2, _pages(sizes), fill=np.nan)
    q, tile = _queries(random, num_tokens, sizes), query_tile(num_tokens)
    num_tiles = num_tokens // tile
    chosen = np.append(random.choice(num_tiles - 1, min(_NUM_SAMPLES, num_tiles) - 1, replace=False), num_tiles - 1)
    tokens = (chosen[:, None] * tile + np.arange(tile)).reshape(-1)
    options: dict[str, Any] = {"scale": sizes.model.head_size**-0.5, "query_tile": tile, "pool_is_finite": False}
    whole = (jnp.int32(1), table, *(jnp.asarray([value], jnp.int32) for value in (0, num_tokens, prompt.context)))

    def expected() -> np.ndarray:
        rows = (np.arange(len(chosen)) * tile, np.full(len(chosen), tile), prompt.num_cached + (chosen + 1) * tile)
        tables = jnp.broadcast_to(table, (len(chosen), table.shape[1]))
        return _expected(q[tokens], kv, jnp.int32(1), tables, *(jnp.asarray(values, jnp.int32) for values in rows), **options)

    def run(function: Callable[..., Any], *arguments: jax.Array) -> jax.Array:
        out = function(*arguments, **options)
        return only_if_finite(out[tokens], out)

    return KernelCheck(run, (q, kv, *whole), expected)


def _expected(q: jax.Array, *rest: jax.Array, **options: Any) -> np.ndarray:
    """Sums are float32 whatever the pool's type, so bfloat16 numbers are used unchanged."""
    return np.asarray(jax.jit(partial(reference.ragged_prefill_attention, **options))(q.astype(jnp.float32), *rest))


def _pages(sizes: BenchmarkSizes) -> PageShape:
    return PageShape(sizes.model.num_kv_heads, sizes.page_size, sizes.model.head_size, sizes.dtype)


def query_tile(num_tokens: int) -> int:
    """Tokens of a query tile, in a step of `num_tokens` tokens."""
    return math.gcd(num_tokens, _QUERY_TILE)


def _queries(random: np.random.Generator, num_tokens: int, sizes: BenchmarkSizes) -> jax.Array:
    shape = (num_tokens, sizes.model.num_heads, sizes.model.head_size)
    return jnp.asarray(random.standard_normal(shape, np.float32), sizes.dtype)
