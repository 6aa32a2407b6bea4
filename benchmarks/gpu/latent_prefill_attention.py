"""latent_prefill_attention: a prompt's tokens over themselves, and a few after a long cached prefix, in the sizes of
DeepSeek-V3 and Kimi K2.5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.problem import KernelCheck, Problem, interleaved_inputs, only_if_finite
from benchmarks.gpu.ragged_prefill_attention import BenchmarkPrompt, query_tile
from benchmarks.gpu.random_pages import PageShape, random_pages
from benchmarks.gpu.roofline import RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes
from pallas_kernels.latent_prefill_attention import reference

_QUESTION = 512  # tokens, after a long conversation
_MAX_CHECKED = 512  # tokens of context of several requests: the reference expands them for each query
_NUM_SAMPLES = 8  # queries of a long prompt that the reference computes, the last among them


@dataclass(frozen=True)
class LatentHeads:
    """Heads of a model on one GPU, and their columns."""

    number: int
    rank: int  # of latents
    own: int  # of keys, and of values
    shared: int  # of keys


_KIMI = LatentHeads(16, 512, 128, 64)  # DeepSeek-V3's on one of eight GPUs, Kimi K2.5's on one of four
_SMALL = LatentHeads(4, 32, 16, 16)


@dataclass(frozen=True)
class LatentBenchmarkCase:
    prompt: BenchmarkPrompt
    heads: LatentHeads
    page_size: int
    dtype: str

    @property
    def work(self) -> RooflineWork:
        """Every token of context is expanded once; a query attends to those before it."""
        prompt, heads, itemsize = self.prompt, self.heads, jnp.dtype(self.dtype).itemsize
        latents, up = prompt.context * (heads.rank + heads.shared), heads.rank * heads.number * 2 * heads.own
        rows = prompt.num_new * heads.number * (2 * heads.own + heads.shared)
        seen = prompt.num_new * (prompt.num_cached + (prompt.num_new + 1) / 2)
        return RooflineWork(
            (latents + up + rows) * itemsize, 2 * prompt.context * up + 2 * heads.number * (2 * heads.own + heads.shared) * seen
        )


def cases(sizes: BenchmarkSizes) -> dict[str, LatentBenchmarkCase]:
    longest, question = max(sizes.prefill), min(_QUESTION, max(sizes.prefill) // 2)
    prompts = {f"{longest} tokens": BenchmarkPrompt(longest), f"{question} tokens after {longest}": BenchmarkPrompt(question, longest)}
    heads = _SMALL if sizes.is_small else _KIMI
    return {name: LatentBenchmarkCase(prompt, heads, sizes.page_size, sizes.dtype) for name, prompt in prompts.items()}


def tilings(sizes: BenchmarkSizes, case: LatentBenchmarkCase) -> list[dict[str, int]]:
    """Tilings to try. Each head has its own keys."""
    return [{"heads": 1, "tokens": tokens, "stages": stages} for tokens, stages in ((64, 2), (64, 4), (128, 2))]


def problem(sizes: BenchmarkSizes, case: LatentBenchmarkCase, seed: int) -> Problem:
    prompt, heads, num_inputs = case.prompt, case.heads, interleaved_inputs(case.work, sizes)
    random = np.random.default_rng([seed, prompt.context])
    latents, table = random_pages(random, np.asarray([prompt.context]), num_inputs, _pages(case), fill=0.0)
    row = tuple(jnp.asarray([value], jnp.int32) for value in (0, prompt.num_new, prompt.context))
    q = _queries(random, prompt.num_new, case)
    # Results become queries; this scale keeps the scores of such small queries spread.
    scale = 0.2 * (prompt.context / q.shape[-1]) ** 0.5

    def step(function: Callable[..., Any], q: jax.Array, shared: Any, layer: jax.Array) -> jax.Array:
        latents, table, row, up, columns = shared
        options = {"scale": scale, "query_tile": query_tile(prompt.num_new), "pool_is_finite": True}
        return jnp.concatenate([function(q, latents, layer, table, *row, up, **options), columns], -1)

    checks = {"several requests": _several_requests(random, case), "one prompt": _one_prompt(random, case)}
    layers = [jnp.int32(layer) for layer in range(num_inputs)]
    shape = {"dtype": case.dtype, "num_heads": heads.number, "head_size": heads.own + heads.shared, "page_size": case.page_size}
    shared = latents, table, row, _up(random, case), q[..., heads.own :]
    return Problem(case.work, q, shared, layers, step, checks, shape | {"tokens": prompt.num_new})


def _several_requests(random: np.random.Generator, case: LatentBenchmarkCase) -> KernelCheck:
    """Several requests, each after a prefix as long as the reference supports. Slots that no request may read are
    NaN."""
    num_tokens = min(case.prompt.num_new, _MAX_CHECKED // 2)
    starts = np.arange(0, num_tokens, max(query_tile(num_tokens), num_tokens // 4))
    query_len = random.integers(1, np.diff([*starts, num_tokens]) + 1)
    kv_len = query_len + random.integers(0, _MAX_CHECKED // 2, len(starts))
    # an unused row
    arguments = _arguments(random, case, num_tokens, *(np.append(values, 0) for values in (starts, query_len, kv_len)))
    options = _options(case, num_tokens)
    return KernelCheck(lambda function, *arguments: function(*arguments, **options), arguments, lambda: _expected(arguments, options))


def _one_prompt(random: np.random.Generator, case: LatentBenchmarkCase) -> KernelCheck:
    """The timed inputs, in full size. A few queries are checked, as rows of their own, because the reference expands
    the context for each."""
    prompt = case.prompt
    arguments = _arguments(random, case, prompt.num_new, *(np.asarray([value]) for value in (0, prompt.num_new, prompt.context)))
    options = _options(case, prompt.num_new)
    tokens = np.append(random.choice(prompt.num_new - 1, _NUM_SAMPLES - 1, replace=False), prompt.num_new - 1)

    def expected() -> np.ndarray:
        q, latents, layer, table, _, _, _, up = arguments
        rows = np.arange(_NUM_SAMPLES), np.ones(_NUM_SAMPLES), prompt.num_cached + tokens + 1
        tables = jnp.broadcast_to(table, (_NUM_SAMPLES, table.shape[1]))
        return _expected((q[tokens], latents, layer, tables, *(jnp.asarray(values, jnp.int32) for values in rows), up), options)

    def run(function: Callable[..., Any], *arguments: jax.Array) -> jax.Array:
        out = function(*arguments, **options)
        return only_if_finite(out[tokens], out)

    return KernelCheck(run, arguments, expected)


def _arguments(random: np.random.Generator, case: LatentBenchmarkCase, num_tokens: int, *rows: np.ndarray) -> tuple[jax.Array, ...]:
    """`rows`: where requests begin, their numbers of tokens, and contexts."""
    latents, table = random_pages(random, rows[2], 2, _pages(case), fill=np.nan)
    of_rows = (jnp.asarray(values, jnp.int32) for values in rows)
    return _queries(random, num_tokens, case), latents, jnp.int32(1), table, *of_rows, _up(random, case)


def _options(case: LatentBenchmarkCase, num_tokens: int) -> dict[str, Any]:
    return {"scale": (case.heads.own + case.heads.shared) ** -0.5, "query_tile": query_tile(num_tokens), "pool_is_finite": False}


def _expected(arguments: tuple[jax.Array, ...], options: dict[str, Any]) -> np.ndarray:
    q, *rest = arguments
    return np.asarray(jax.jit(partial(reference.latent_prefill_attention, **options))(q.astype(jnp.float32), *rest))


def _pages(case: LatentBenchmarkCase) -> PageShape:
    return PageShape(1, case.page_size, case.heads.rank + case.heads.shared, case.dtype, num_sides=1)


def _queries(random: np.random.Generator, num_tokens: int, case: LatentBenchmarkCase) -> jax.Array:
    shape = (num_tokens, case.heads.number, case.heads.own + case.heads.shared)
    return jnp.asarray(random.standard_normal(shape, np.float32), case.dtype)


def _up(random: np.random.Generator, case: LatentBenchmarkCase) -> jax.Array:
    shape = (case.heads.rank, case.heads.number, 2 * case.heads.own)
    return jnp.asarray(random.standard_normal(shape, np.float32) * case.heads.rank**-0.5, case.dtype)
