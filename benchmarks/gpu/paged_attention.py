"""paged_attention: one token a request over its pages, in Llama-3.1-8B's shape, or several, also with float8 pages, and
over DeepSeek-V3's latents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.problem import KernelCheck, Problem, interleaved_inputs
from benchmarks.gpu.random_pages import PageShape, random_pages
from benchmarks.gpu.roofline import RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes
from pallas_kernels.mosaic.card import HOPPER
from pallas_kernels.paged_attention import reference

_SEVERAL = 4  # a draft of three and the token before them
# DeepSeek-V3's and Kimi K2.5's: one latent for all heads
_LATENTS = {"num_heads": 128, "head_size": 576, "value_size": 512}
_SMALL_LATENTS = {"num_heads": 8, "head_size": 96, "value_size": 64}


@dataclass(frozen=True)
class DecodeBenchmarkCase:
    batch: int
    context: int
    num_heads: int
    shape: PageShape
    value_size: int | None = None  # for latents: the columns that are values, too
    tokens: int = 1  # query tokens of a request

    @property
    def has_scales(self) -> bool:
        return jnp.dtype(self.shape.dtype).itemsize == 1

    @property
    def work(self) -> RooflineWork:
        """Every cached number is read once, whatever the number of queries. Queries and results have 2 bytes, or the
        pages' itemsize if that is more."""
        shape, tokens = self.shape, self.batch * self.context
        itemsize = jnp.dtype(shape.dtype).itemsize
        values = self.value_size or shape.head_size
        cached = shape.num_sides * tokens * shape.num_kv_heads * shape.head_size * itemsize
        rows = self.batch * self.tokens * self.num_heads * (shape.head_size + values) * max(itemsize, 2)
        return RooflineWork(cached + rows, 2 * tokens * self.tokens * self.num_heads * (shape.head_size + values))


def plain_cases(sizes: BenchmarkSizes) -> dict[str, tuple[int, int]]:
    """Batch and context of the cases that other implementations support."""
    return {f"batch {batch}, context {context}": (batch, context) for batch, context in sizes.decode}


def cases(sizes: BenchmarkSizes) -> dict[str, DecodeBenchmarkCase]:
    model = sizes.model
    plain = PageShape(model.num_kv_heads, sizes.page_size, model.head_size, sizes.dtype)
    float8 = PageShape(model.num_kv_heads, sizes.page_size, model.head_size, "float8_e4m3fn")
    latents = _SMALL_LATENTS if sizes.is_small else _LATENTS
    latent = PageShape(1, sizes.page_size, latents["head_size"], sizes.dtype, num_sides=1)
    found = {name: DecodeBenchmarkCase(*size, model.num_heads, plain) for name, size in plain_cases(sizes).items()}
    found |= {f"batch 1, context {context}": DecodeBenchmarkCase(1, context, model.num_heads, plain) for context in sizes.short}
    for name, (batch, context) in list(plain_cases(sizes).items())[-2:]:
        found[f"float8, {name}"] = DecodeBenchmarkCase(batch, context, model.num_heads, float8)
        found[f"latents, {name}"] = DecodeBenchmarkCase(batch, context, latents["num_heads"], latent, latents["value_size"])
    name, size = list(plain_cases(sizes).items())[-2]
    found[f"{_SEVERAL} tokens, {name}"] = DecodeBenchmarkCase(*size, model.num_heads, plain, tokens=_SEVERAL)
    return found


def tilings(sizes: BenchmarkSizes, case: DecodeBenchmarkCase) -> list[dict[str, int]]:
    """KV splits of 128 tokens and more, while there are fewer than four times the blocks that run at a time."""
    blocks = case.batch * case.shape.num_kv_heads * max(1, case.tokens * case.num_heads // case.shape.num_kv_heads // 64)
    splits = [s for s in (1, 2, 4, 8, 16, 32) if s == 1 or (case.context // s >= 128 and blocks * s <= 4 * HOPPER.multiprocessors)]
    # Tokens, stages and warpgroups.
    tiles = ((64, 2, 1),) if case.value_size else ((64, 4, 1), (64, 6, 1), (64, 2, 2), (64, 4, 2), (64, 6, 2), (128, 2, 2))
    return [{"tokens": t, "stages": stages, "splits": s, "warpgroups": w} for t, stages, w in tiles for s in splits]


def problem(sizes: BenchmarkSizes, case: DecodeBenchmarkCase, seed: int) -> Problem:
    num_inputs = interleaved_inputs(case.work, sizes)
    random = np.random.default_rng([seed, case.batch, case.context])
    kv, table = random_pages(random, np.full(case.batch, case.context), num_inputs, case.shape, fill=0.0)
    lengths, scales = jnp.full(case.batch, case.context, jnp.int32), _scales(random, num_inputs, case)
    q = _queries(random, case, sizes)
    # Results become queries; this scale keeps the scores of such small queries spread.
    scale = 0.5 * math.sqrt(case.context / case.shape.head_size)

    def step(function: Callable[..., Any], q: jax.Array, shared: tuple[Any, ...], layer: jax.Array) -> jax.Array:
        kv, table, lengths, scales, columns = shared
        out = function(q, kv, layer, table, lengths, scale=scale, pool_is_finite=True, **_options(case, scales))
        return out if case.value_size is None else jnp.concatenate([out, columns], -1)

    # NaN where nothing may be read; where the pool is promised finite, numbers that would show in a result.
    fills = {"poisoned pool": np.nan, "finite pool": 300.0 if case.has_scales else 3e4}
    checks = {name: _check(sizes, case, int(random.integers(2**31)), fill, name == "finite pool") for name, fill in fills.items()}
    layers = [jnp.int32(layer) for layer in range(num_inputs)]
    columns = None if case.value_size is None else q[..., case.value_size :]
    return Problem(case.work, q, (kv, table, lengths, scales, columns), layers, step, checks, shape_of(case))


def shape_of(case: DecodeBenchmarkCase) -> dict[str, Any]:
    """The key by which `mosaic_tiling.tiling_for` finds a tiling; for latents, which are not tuned, more."""
    about = asdict(case)
    about |= about.pop("shape")
    # tokens that fit in the page table
    about["context"] = -(-case.context // case.shape.page_size) * case.shape.page_size
    about["num_heads"] *= about.pop("tokens")  # to the kernel they are one token's heads
    of_latents = {"num_sides": about.pop("num_sides"), "value_size": about.pop("value_size")}
    return about if case.value_size is None else about | of_latents


def _check(sizes: BenchmarkSizes, case: DecodeBenchmarkCase, seed: int, fill: float, pool_is_finite: bool) -> KernelCheck:
    random = np.random.default_rng(seed)
    contexts = some_contexts(random, case)
    kv, table = random_pages(random, contexts, 2, case.shape, fill=fill)
    arguments = (_queries(random, case, sizes), kv, jnp.int32(1), table, jnp.asarray(contexts, jnp.int32), _scales(random, 2, case))

    def run(function: Callable[..., Any], q: jax.Array, *rest: Any) -> jax.Array:
        options = _options(case, rest[-1])
        return function(q, *rest[:-1], scale=case.shape.head_size**-0.5, pool_is_finite=pool_is_finite, **options)

    def expected() -> np.ndarray:
        # Sums are float32 whatever the pool's type, so narrower numbers are used unchanged.
        q, *rest = arguments
        return np.asarray(jax.jit(partial(run, reference.paged_attention))(q.astype(jnp.float32), *rest))

    return KernelCheck(run, arguments, expected)


def some_contexts(random: np.random.Generator, case: DecodeBenchmarkCase) -> np.ndarray:
    """Contexts of any length up to the case's, which one request has; of several requests one has none."""
    contexts = random.permutation([case.context, *random.integers(1, case.context + 1, case.batch - 1)])
    if case.batch > 2:
        contexts[np.argmin(contexts)] = 0
    return contexts


def _options(case: DecodeBenchmarkCase, scales: jax.Array | None) -> dict[str, Any]:
    options: dict[str, Any] = {} if scales is None else {"kv_scales": scales}
    return options if case.value_size is None else options | {"value_size": case.value_size}


def _scales(random: np.random.Generator, num_layers: int, case: DecodeBenchmarkCase) -> jax.Array | None:
    if not case.has_scales:
        return None
    return jnp.asarray(random.uniform(0.5, 1.5, (num_layers, case.shape.num_sides, case.shape.num_kv_heads)), jnp.float32)


def _queries(random: np.random.Generator, case: DecodeBenchmarkCase, sizes: BenchmarkSizes) -> jax.Array:
    tokens = [case.tokens] if case.tokens > 1 else []
    shape = (case.batch, *tokens, case.num_heads, case.shape.head_size)
    return jnp.asarray(random.standard_normal(shape, np.float32), sizes.dtype)
