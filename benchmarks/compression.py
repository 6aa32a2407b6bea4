"""`python -m benchmarks.compression`: lossless weights beside plain bfloat16: speed of products and of the engine,
bytes of real models, rate of packing.

Both ways run in turns in one process. A figure is a median, a ratio that of two measurements of one round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_kernels import MATRICES, seconds
from checkpoints.exponent_coding import ExponentCoder
from checkpoints.hub import open_source, resolve
from checkpoints.source import TensorSource
from jaxinfer import LLM, SamplingParams
from pallas_kernels.lossless_matmul.layout import packs, unpack
from pallas_kernels.lossless_matmul.op import lossless_matmul, pack
from pallas_kernels.packed_matmul import layout as packed_layout
from pallas_kernels.packed_matmul.op import packed_matmul

LAYERS = 30
BATCHES = (1, 8, 32)
PROMPT, NEW_TOKENS = 16, 96
BFLOAT16 = jnp.dtype(jnp.bfloat16)

Ratios = list[tuple[float, float]]  # seconds: plain, lossless


def in_turns(plain: Callable[[], float], lossless: Callable[[], float], rounds: int) -> Ratios:
    """Each round's seconds; who goes first changes."""
    found = []
    for number in range(rounds):
        if number % 2:
            second, first = lossless(), plain()
        else:
            first, second = plain(), lossless()
        found.append((first, second))
    return found


def stacks() -> tuple[list[jax.Array], list[jax.Array]]:
    """SmolLM2-135M's matrices of all layers with random values: packed bfloat16, and lossless."""
    random = np.random.default_rng(0)
    by_kind: tuple[list[jax.Array], list[jax.Array]] = [], []
    for inputs, outputs in MATRICES:
        matrices = jnp.asarray(random.standard_normal((LAYERS, outputs, inputs), np.float32) / 24, BFLOAT16)
        by_kind[0].append(jax.vmap(lambda matrix: packed_layout.pack(matrix, BFLOAT16))(matrices))
        by_kind[1].append(jnp.stack([jax.jit(pack)(matrix) for matrix in matrices]))
    return by_kind


def products(of_stacks: tuple[list[jax.Array], list[jax.Array]], num_rows: int, rounds: int) -> Ratios:
    """Rows times the matrices of all layers."""
    random = np.random.default_rng(1)
    rows = [jnp.asarray(random.standard_normal((num_rows, inputs), np.float32), BFLOAT16) for inputs, _ in MATRICES]

    def run(kernel: Callable[..., jax.Array], rows: list[jax.Array], of_kind: list[jax.Array]) -> jax.Array:
        sums = jnp.float32(0)
        for i in range(LAYERS):
            for x, stack in zip(rows, of_kind, strict=True):
                sums += kernel(x, stack, jnp.int32(i))[0, 0]
        return sums

    ways = [partial(jax.jit(partial(run, kernel)), rows, s) for kernel, s in zip((packed_matmul, lossless_matmul), of_stacks, strict=True)]
    for way in ways:
        jax.block_until_ready(way())
    return in_turns(partial(seconds, ways[0]), partial(seconds, ways[1]), rounds)


def engines(model: str, ways: Sequence[str]) -> list[LLM]:
    """One for each of these `weights`."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_memory": "256MiB", "max_batch_size": max(BATCHES), "decode_buckets": BATCHES}
    settings |= {"max_model_len": 1024, "prefill_buckets": (16, 512), "prefill_chunk_size": 512}
    return [LLM(model, weights=weights, **settings) for weights in ways]


def generation(llm: LLM, batch: int, prompt: int, new_tokens: int) -> float:
    """Seconds of one batch."""
    random = np.random.default_rng(time.monotonic_ns())  # nothing is found in the prefix cache
    prompts = random.integers(100, 40_000, (batch, prompt)).tolist()
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - began


def whole_engine(llms: Sequence[LLM], rounds: int) -> Iterator[tuple[str, Ratios]]:
    """Two engines: decode at each batch size, and prefill of 512 tokens."""
    for batch in BATCHES:
        ways = [partial(generation, llm, batch, PROMPT, NEW_TOKENS) for llm in llms]
        yield f"decode, batch {batch}", in_turns(ways[0], ways[1], rounds)
    ways = [partial(generation, llm, 1, 512, 1) for llm in llms]
    yield "prefill of 512 tokens", in_turns(ways[0], ways[1], rounds)


def real_weights(source: TensorSource) -> tuple[int, int]:
    """A checkpoint's bytes in bfloat16, and packed; what doesn't pack stays as it is."""
    plain = packed = 0
    for name in source.names():
        if source.stored(name).format == "I64":  # places of tokens, not weights
            continue
        tensor = jnp.asarray(source.read(name), BFLOAT16)
        plain += tensor.nbytes
        packed += pack(tensor).nbytes if tensor.ndim == 2 and packs(*tensor.shape) else tensor.nbytes
    return plain, packed


def rates() -> Iterator[tuple[str, float, float]]:
    """What the bytes become, and bytes of bfloat16 a second: of packing for memory (all cores) and unpacking, of coding
    for files and of Zstandard (one core)."""
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((3072, 2304), np.float32) / 24, BFLOAT16)
    tiles = jax.block_until_ready(jax.jit(pack)(matrix))
    plain = np.asarray(matrix).reshape(-1).view(np.uint8)
    coder, decoded = ExponentCoder(2), np.empty_like(plain)
    coded = b"".join(coder.encode(plain))
    frame = zstandard.ZstdCompressor(3).compress(plain.data)
    packed = tiles.nbytes / matrix.nbytes

    def decode() -> None:
        coder.decode(coded, decoded)

    def transcode() -> jax.Array:
        decode()
        return jax.jit(pack)(decoded.view(BFLOAT16).reshape(matrix.shape))

    ways: list[tuple[str, float, Callable[[], Any]]] = [
        ("in memory: pack", packed, partial(jax.jit(pack), matrix)),
        ("in memory: unpack (tests only)", packed, partial(jax.jit(unpack), tiles)),
        ("in files: encode", len(coded) / len(plain), partial(coder.encode, plain)),
        ("in files: decode", len(coded) / len(plain), decode),
        ("from files to memory", packed, transcode),
        ("Zstandard level 3: encode", len(frame) / len(plain), partial(zstandard.ZstdCompressor(3).compress, plain.data)),
        ("Zstandard level 3: decode", len(frame) / len(plain), partial(zstandard.ZstdDecompressor().decompress, frame)),
    ]
    for name, ratio, way in ways:
        jax.block_until_ready(way())
        yield name, ratio, matrix.nbytes / statistics.median(seconds(way) for _ in range(3))


def row(found: Ratios) -> tuple[str, str, str]:
    plain, lossless = (statistics.median(way) * 1e3 for way in zip(*found, strict=True))
    ratios = sorted(first / second for first, second in found)
    return f"{plain:.2f}", f"{lossless:.2f}", f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each way (default: %(default)s)")
    parser.add_argument("--model", default="default", help="whose engine and bytes are measured (default: %(default)s)")
    parser.add_argument("--also", nargs="*", default=[], metavar="MODEL", help="others whose bytes are counted, such as minilm")
    options = parser.parse_args(arguments)
    console = Console()
    columns = ("bfloat16, ms", "lossless, ms", "times as fast")
    table = Table("all layers of SmolLM2-135M", *columns, title="products")
    of_stacks = stacks()
    for num_rows in (1, 4, 8, 32, 128, 512):
        table.add_row(f"{num_rows} row{'s' if num_rows > 1 else ''}", *row(products(of_stacks, num_rows, options.rounds)))
    console.print(table)
    del of_stacks
    table = Table(options.model, *columns, title="the engine, host work and all")
    llms = engines(options.model, ("dequantised", "lossless"))
    for name, found in whole_engine(llms, options.rounds):
        table.add_row(name, *row(found))
    for llm in llms:
        llm.close()
    console.print(table)
    table = Table("weights", "bfloat16, MB", "lossless, MB", "saved", "bits a weight", title="in memory")
    for model in (options.model, *options.also):
        plain, packed = real_weights(open_source(resolve(model)))
        table.add_row(model, f"{plain / 1e6:.1f}", f"{packed / 1e6:.1f}", f"{1 - packed / plain:.1%}", f"{16 * packed / plain:.2f}")
    console.print(table)
    table = Table("14 MB of normal values", "of the bytes", "GB/s", title="rates")
    for name, ratio, rate in rates():
        table.add_row(name, f"{ratio:.1%}", f"{rate / 1e9:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
