"""`python -m benchmarks.cpu_kernels`: the CPU kernels compared with XLA, in interleaved runs of one process.

Shapes are SmolLM2-135M's. Each implementation is compiled and timed alone. A figure is the median of the rounds, a
ratio that of two measurements of one round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxinfer.weights.formats.plain import multiply
from pallas_kernels.packed_matmul.layout import pack
from pallas_kernels.packed_matmul.op import packed_matmul, unsupported_reason
from pallas_kernels.paged_attention.op import paged_attention
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 30, 9, 3, 64, 16
MATRICES = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # of a layer: inputs, outputs
PASSES = 5  # a measurement is the fastest of this many


@dataclass(frozen=True)
class Pair:
    """The same work in two implementations; each call runs it once."""

    name: str
    kernel: Callable[[], Any]
    xla: Callable[[], Any]


def products(dtype: str, num_rows: int, layers: int = LAYERS) -> Pair:
    """Rows times the matrices of all layers, layer by layer as in a model."""
    random = np.random.default_rng(0)
    stacks = [random.standard_normal((layers, *shape), np.float32) / 24 for shape in MATRICES]
    plain = [[jnp.asarray(matrix, dtype) for matrix in stack] for stack in stacks]
    packed = [jax.vmap(lambda matrix: pack(matrix.T, jnp.dtype(dtype)))(stack) for stack in stacks]
    x = jnp.asarray(random.standard_normal((num_rows, 576), np.float32))

    def layer(x: jax.Array, multiply: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        attended = multiply(multiply(x, 0)[:, :576], 1)
        x = x + attended * 0.1
        wide = multiply(x, 2)
        x = x + multiply(wide[:, :1536] + wide[:, 1536:], 3) * 0.1
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def by_kernel(x: jax.Array, stacks: Sequence[jax.Array]) -> jax.Array:
        for i in range(layers):
            x = layer(x, lambda rows, kind, i=i: packed_matmul(rows.astype(dtype), stacks[kind], jnp.int32(i)))  # type: ignore[misc]
        return x

    def by_xla(x: jax.Array, plain: Sequence[Sequence[jax.Array]]) -> jax.Array:
        for i in range(layers):
            x = layer(x, lambda rows, kind, i=i: multiply(rows, plain[kind][i]))  # type: ignore[misc]
        return x

    name = f"{dtype} products, {num_rows} row{'s' if num_rows > 1 else ''}"
    return Pair(name, partial(jax.jit(by_kernel), x, packed), partial(jax.jit(by_xla), x, plain))


def pool_for(num_tokens: int, layers: int) -> jax.Array:
    shape = (layers, 2, -(-num_tokens // PAGE_SIZE) + 1, KV_HEADS, PAGE_SIZE, HEAD_SIZE)
    return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def decode_attention(batch: int, context: int, layers: int = LAYERS) -> Pair:
    """One token a row over its context, in every layer."""
    pool = pool_for(batch * context, layers)
    pages = np.random.default_rng(1).permutation(pool.shape[2] - 1)[: batch * (context // PAGE_SIZE)].reshape(batch, -1) + 1
    q = jax.random.normal(jax.random.key(2), (batch, HEADS, HEAD_SIZE))
    lengths = jnp.full(batch, context, jnp.int32)

    def run(pool: jax.Array, q: jax.Array, table: jax.Array, lengths: jax.Array, backend: Any) -> jax.Array:
        for i in range(layers):
            q = paged_attention(q, pool, jnp.int32(i), table, lengths, scale=HEAD_SIZE**-0.5, pool_is_finite=True, backend=backend)
        return q

    name = f"decode attention, {batch} of {context} tokens"
    return _pair(name, run, pool, q, jnp.asarray(pages, jnp.int32), lengths)


def prefill_attention(num_tokens: int, before: int, layers: int = LAYERS) -> Pair:
    """The next tokens of one row over what is cached and themselves, in every layer."""
    pool = pool_for(num_tokens + before, layers)
    table = jnp.arange(1, pool.shape[2], dtype=jnp.int32)[None]
    q = jax.random.normal(jax.random.key(2), (num_tokens, HEADS, HEAD_SIZE))
    row = [jnp.asarray([value], jnp.int32) for value in (0, num_tokens, num_tokens + before)]

    def run(pool: jax.Array, q: jax.Array, table: jax.Array, row: list[jax.Array], backend: Any) -> jax.Array:
        attend = partial(ragged_prefill_attention, scale=HEAD_SIZE**-0.5, query_tile=32, pool_is_finite=True, backend=backend)
        for i in range(layers):
            q = attend(q, pool, jnp.int32(i), table, *row)
        return q

    return _pair(f"prefill attention, {num_tokens} tokens after {before}", run, pool, q, table, row)


def _pair(name: str, run: Callable[..., Any], *arguments: Any) -> Pair:
    compiled = jax.jit(run, static_argnames="backend")
    return Pair(name, *(partial(compiled, *arguments, backend=backend) for backend in ("llvm_cpu", "xla")))


def pairs() -> Iterator[Callable[[], Pair]]:
    """Pairs are created one at a time: their weights and pools are large."""
    for dtype in ("float32", "bfloat16"):
        if unsupported_reason(jnp.dtype(dtype)) is None:
            yield from (partial(products, dtype, num_rows) for num_rows in (1, 8, 32, 128, 512))
    yield from (partial(decode_attention, batch, context) for batch, context in ((1, 64), (1, 1024), (8, 256), (32, 64), (32, 256)))
    yield from (partial(prefill_attention, size, before) for size, before in ((128, 0), (512, 0), (512, 512), (512, 1536)))


def seconds(run: Callable[[], Any]) -> float:
    """The fastest of a few runs."""
    found = []
    for _ in range(PASSES):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return min(found)


def measure(pair: Pair, rounds: int) -> list[tuple[float, float]]:
    """For each round, the kernel's seconds and XLA's."""
    for run in (pair.kernel, pair.xla):
        jax.block_until_ready(run())
    found = []
    for number in range(rounds):
        if number % 2:
            xla, kernel = seconds(pair.xla), seconds(pair.kernel)
        else:
            kernel, xla = seconds(pair.kernel), seconds(pair.xla)
        found.append((kernel, xla))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each way (default: %(default)s)")
    options = parser.parse_args(arguments)
    table = Table("all layers of SmolLM2-135M", "kernel, ms", "XLA, ms", "times as fast", title="kernels for CPUs beside XLA")
    for make in pairs():
        pair = make()
        found = measure(pair, options.rounds)
        kernel, xla = (statistics.median(way) * 1e3 for way in zip(*found, strict=True))
        ratios = sorted(theirs / ours for ours, theirs in found)
        table.add_row(pair.name, f"{kernel:.2f}", f"{xla:.2f}", f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    Console().print(table)


if __name__ == "__main__":
    main()
