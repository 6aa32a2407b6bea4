"""grouped_matmul: tokens sorted by their expert, each times its expert's matrix, in the shapes and formats of real
mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import roofline
from benchmarks.gpu.problem import KernelCheck, Problem, only_if_finite
from benchmarks.gpu.roofline import RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes
from pallas_kernels.grouped_matmul import formats, lossless, reference
from pallas_kernels.grouped_matmul.cases import CASES, TINY, ExpertsCase

# bytes of a weight
_OF_TILE = formats.OUTPUTS * formats.INPUTS
_BYTES = {
    "bfloat16": 2.0,
    "int4": 4.5 / 8,
    "fp8": 1 + 4 * formats.LINE / _OF_TILE,
    "lossless": 4 * formats.WORDS * sum(lossless.ROWS) / _OF_TILE,
}
_NO_NAN = np.uint32(0xF7F7F7F7)  # of float8_e4m3fn's codes only those with all bits of the magnitude set are NaN
_CHECKED = 8  # experts that are checked, by the first and last row of each
_UNOWNED = 8  # rows without an expert


def cases(sizes: BenchmarkSizes) -> dict[str, tuple[ExpertsCase, int]]:
    models = TINY if sizes.is_small else CASES
    return {f"{case.name}, {tokens} tokens": (case, tokens) for case in models for tokens in sizes.grouped}


def work(case: ExpertsCase, counts: np.ndarray) -> RooflineWork:
    """Up to the experts' width and back. Matrices of experts without rows are not read. Packed weights are multiplied
    as bfloat16."""
    reached, rows = int(np.count_nonzero(counts)), int(counts.sum())
    there = roofline.product(rows, case.inputs, case.outputs, 2, 0)
    weights = RooflineWork(reached * case.inputs * case.outputs * _BYTES[case.format], 0)
    return (there + weights).times(2)


def groups(case: ExpertsCase, num_tokens: int, seed: int) -> np.ndarray:
    """Rows of each expert where tokens choose at random: some experts have none."""
    random = np.random.default_rng([seed, num_tokens])
    return np.bincount(random.integers(0, case.num_experts, num_tokens * case.experts_per_token), minlength=case.num_experts)


def tilings(sizes: BenchmarkSizes, case_and_tokens: tuple[ExpertsCase, int]) -> list[dict[str, int]]:
    """Tiles about as large as an expert's rows. The most stages that fit are seldom the worst."""
    case, tokens = case_and_tokens
    share = tokens * case.experts_per_token / case.num_experts
    rows = [r for r in (8, 16, 32, 64, 128, 256) if share / 2 <= r <= share * 8 and (r <= 128 or case.format == "bfloat16")]
    return [{"rows": r, "stages": stages} for r in rows or [128] for stages in (3, 4, 6, 8)]


def problem(sizes: BenchmarkSizes, case_and_tokens: tuple[ExpertsCase, int], seed: int) -> Problem:
    """The result of the one product is the other's input. A call reads far more than a cache holds, so one set of
    inputs is enough."""
    case, num_tokens = case_and_tokens
    counts = groups(case, num_tokens, seed)
    into, back = weights(case, seed), weights(replace(case, inputs=case.outputs, outputs=case.inputs), seed + 1)
    x = _rows(int(counts.sum()), case, seed)

    def step(function: Callable[..., Any], x: jax.Array, shared: Any, _: int) -> jax.Array:
        into, back, counts = shared
        return function(function(x, into, counts), back, counts)

    shape = {"format": case.format, "experts": case.num_experts, "inputs": case.inputs, "outputs": case.outputs, "rows": len(x)}
    checks = {"groups of any size": _check(case, into, groups(case, num_tokens, seed + 2), seed)}
    return Problem(work(case, counts), x, (into, back, jnp.asarray(counts, jnp.int32)), [None], step, checks, shape)


def weights(case: ExpertsCase, seed: int) -> Any:
    """Random matrices of the case's format; products are about as large as the inputs."""
    key, other = jax.random.split(jax.random.key(seed, impl="rbg"))
    if case.format in ("bfloat16", "lossless"):
        shape = (case.num_experts, case.inputs, case.outputs)
        plain = jax.jit(lambda: (jax.random.normal(key, shape, jnp.bfloat16) * case.inputs**-0.5).astype(jnp.bfloat16))()
        return plain if case.format == "bfloat16" else jax.jit(lossless.lossless_from_bfloat16)(plain.swapaxes(1, 2))
    tiles = (case.num_experts, case.outputs // formats.OUTPUTS, case.inputs // formats.INPUTS)
    is_int4 = case.format == "int4"
    mask = np.uint32(0xFFFFFFFF) if is_int4 else _NO_NAN
    words_shape = (*tiles, formats.OUTPUTS * (1 if is_int4 else 2), formats.WORDS)
    words = jax.jit(lambda: jax.lax.bitcast_convert_type(jax.random.bits(key, words_shape, jnp.uint32) & mask, jnp.int32))()
    scale_shape: tuple[int, ...] = (*tiles, 2, 256) if is_int4 else tiles
    scale = jax.random.uniform(other, scale_shape, jnp.float32, 0.5, 1.5)

    def made(scale: jax.Array) -> Any:
        if is_int4:
            return formats.Int4(words, scale.astype(jnp.bfloat16))
        return formats.Fp8(words, jnp.repeat(scale[..., None], formats.LINE, -1))

    first = jax.jit(lambda all_: formats.dequantise(jax.tree.map(lambda a: a[:1], all_)).astype(jnp.float32))(made(scale))
    return made(scale / (jnp.sqrt(jnp.mean(first**2)) * case.inputs**0.5))


def _check(case: ExpertsCase, into: Any, counts: np.ndarray, seed: int) -> KernelCheck:
    """The first and the last row of some experts, and rows past all experts'. Everything else must be finite."""
    ends = np.cumsum(counts)
    owned = np.flatnonzero(counts)
    experts = np.random.default_rng(seed).permutation(owned)[:_CHECKED]
    rows = np.stack([ends[experts] - counts[experts], ends[experts] - 1], 1)
    total = int(counts.sum())
    x = jnp.concatenate([_rows(total, case, seed + 3), jnp.full((_UNOWNED, case.inputs), jnp.nan, jnp.bfloat16)])
    sizes = jnp.asarray(counts, jnp.int32)

    def run(function: Callable[..., Any], *arguments: Any) -> jax.Array:
        out = function(*arguments)
        return only_if_finite(out[np.append(rows.reshape(-1), np.arange(total, len(x)))], out)

    def expected() -> np.ndarray:
        @jax.jit
        def of(expert: jax.Array, x: jax.Array, into: Any) -> jax.Array:
            one = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, expert, 1), into)
            return reference.grouped_matmul(x.astype(jnp.float32), one, jnp.asarray([2]))

        found = [np.asarray(of(jnp.int32(expert), x[pair], into)) for expert, pair in zip(experts, rows, strict=True)]
        return np.concatenate([*found, np.zeros((_UNOWNED, case.outputs), np.float32)])

    return KernelCheck(run, (x, into, sizes), expected)


def _rows(num_rows: int, case: ExpertsCase, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed + 4), (num_rows, case.inputs), jnp.bfloat16)
