"""`python -m benchmarks.residual_split`: what a reduce-scatter with an all-gather would save where layers have an
all-reduce.

Either each half of a layer ends in an all-reduce, and every device adds and normalises all tokens, as in the engine. Or
it ends in a reduce-scatter, each device adds and normalises its share of the tokens, and an all-gather comes before the
next product. A half of a layer is a norm and two products, in the sizes of SmolLM2-135M, on this machine's GPUs or on
virtual devices of its CPU. Runs of both are interleaved in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

from jaxinfer.weights.formats.plain import multiply
from sharding.mesh import TENSOR

Matrices: TypeAlias = Sequence[tuple[Array, Array]]  # of each half of a layer: its columns are split, then its rows

_COLUMNS, _ROWS, _TOKENS = PartitionSpec(None, TENSOR), PartitionSpec(TENSOR, None), PartitionSpec(TENSOR, None)


@dataclass(frozen=True)
class MlpSizes:
    hidden: int = 576
    inner: int = 1536
    num_layers: int = 30


@dataclass(frozen=True)
class Implementations:
    """The same work in two implementations; each runs it once and returns the residual after all layers, on every
    device."""

    all_reduce: Callable[[], Float[Array, "T D"]]
    reduce_scatter: Callable[[], Float[Array, "T D"]]


def implementations(devices: Sequence[jax.Device], num_tokens: int, sizes: MlpSizes, dtype: str) -> Implementations:
    """The number of tokens is a multiple of the devices."""
    mesh = jax.sharding.Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Explicit,))
    random = np.random.default_rng(0)

    def placed(shape: tuple[int, int], spec: PartitionSpec, kind: str) -> Array:
        return jax.device_put(jnp.asarray(random.standard_normal(shape, np.float32) / shape[0] ** 0.5, kind), NamedSharding(mesh, spec))

    halves = [sizes.hidden, sizes.inner] * sizes.num_layers
    matrices = [(placed((sizes.hidden, inner), _COLUMNS, dtype), placed((inner, sizes.hidden), _ROWS, dtype)) for inner in halves]
    activations = "float32" if devices[0].platform == "cpu" else dtype
    x = placed((num_tokens, sizes.hidden), PartitionSpec(), activations)

    def compiled(local: Callable[[Array, Matrices], Array], tokens: PartitionSpec) -> Callable[[], Array]:
        over_shards = jax.shard_map(
            local, mesh=mesh, in_specs=(tokens, [(_COLUMNS, _ROWS)] * len(halves)), out_specs=tokens, check_vma=False
        )

        def run(x: Array, matrices: Matrices) -> Array:
            return jax.sharding.reshard(over_shards(jax.sharding.reshard(x, tokens), matrices), PartitionSpec())

        with jax.set_mesh(mesh):
            return partial(jax.jit(run).lower(x, matrices).compile(), x, matrices)

    return Implementations(compiled(_all_reduce, PartitionSpec()), compiled(_reduce_scatter, _TOKENS))


def _all_reduce(x: Array, matrices: Matrices) -> Array:
    for columns, rows in matrices:
        x = x + jax.lax.psum(_half(_norm(x), columns, rows), TENSOR)
    return x


def _reduce_scatter(x: Array, matrices: Matrices) -> Array:
    for columns, rows in matrices:
        whole = jax.lax.all_gather(_norm(x), TENSOR, axis=0, tiled=True)
        x = x + jax.lax.psum_scatter(_half(whole, columns, rows), TENSOR, scatter_dimension=0, tiled=True)
    return x


def _half(x: Array, columns: Array, rows: Array) -> Array:
    return multiply(jax.nn.silu(multiply(x, columns)), rows)


def _norm(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def measure(both: Implementations, rounds: int) -> list[tuple[float, float]]:
    """For each round, seconds with all-reduces and seconds without."""
    found = []
    for number in range(rounds + 1):
        runs = (both.all_reduce, both.reduce_scatter)
        taken = {run: _seconds(run) for run in (runs if number % 2 else runs[::-1])}
        found.append((taken[both.all_reduce], taken[both.reduce_scatter]))
    return found[1:]  # the first warms up


def _seconds(run: Callable[[], Array]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.residual_split", description=(__doc__ or "").splitlines()[0])
    flag = parser.add_argument
    flag("--devices", type=int, nargs="+", default=[2, 4, 8], help="numbers of devices (default: %(default)s)")
    flag("--tokens", type=int, nargs="+", default=[128, 512, 2048], help="of a prefill step (default: %(default)s)")
    flag("--hidden", type=int, default=MlpSizes.hidden, help="size of a residual (default: %(default)s)")
    flag("--inner", type=int, default=MlpSizes.inner, help="size between an MLP's products (default: %(default)s)")
    flag("--layers", type=int, default=MlpSizes.num_layers, help="(default: %(default)s)")
    flag("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of matrices (default: %(default)s)")
    flag("--rounds", type=int, default=20, help="measurements of each way (default: %(default)s)")
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    sizes = MlpSizes(options.hidden, options.inner, options.layers)
    devices = jax.devices()
    kind = f"{'virtual devices of a ' if devices[0].platform == 'cpu' else ''}{devices[0].device_kind}"
    title = f"{options.layers} layers of {options.hidden} and {options.inner} on {kind}"
    table = Table("devices", "tokens", "all-reduce, ms", "reduce-scatter and all-gather, ms", "times as fast", title=title)
    for num_devices in options.devices:
        for num_tokens in options.tokens:
            found = measure(implementations(devices[:num_devices], num_tokens, sizes, options.dtype), options.rounds)
            all_reduce, reduce_scatter = (statistics.median(way) * 1e3 for way in zip(*found, strict=True))
            ratios = sorted(before / after for before, after in found)
            low, middle, high = ratios[len(ratios) // 10], statistics.median(ratios), ratios[-1 - len(ratios) // 10]
            table.add_row(
                f"{num_devices}", f"{num_tokens}", f"{all_reduce:.1f}", f"{reduce_scatter:.1f}", f"{middle:.2f} ({low:.2f}-{high:.2f})"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
