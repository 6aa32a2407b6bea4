"""`python -m benchmarks.gpu.smoke`: each variant of each kernel once, in a tiny size and a process of its own, the
simplest first.

For the first minutes on a GPU: it shows which kernels run, are wrong, crash or hang. A variant that hangs costs
`--seconds`. Nothing is timed. On a CPU JAX's interpreter runs the kernels (`--interpret`), which shows that this script
works. It is thousands of times slower, so there are few repeats.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import (
    grouped_matmul,
    interpreter,
    latent_prefill_attention,
    paged_attention,
    ragged_prefill_attention,
    write_and_attend,
)
from benchmarks.gpu.kernels import GPU_BACKEND, check_against_reference, implementation
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.random_pages import PageShape
from benchmarks.gpu.sizes import SMALL, ModelSizes
from pallas_kernels.grouped_matmul.cases import TINY, TINY_LOSSLESS

# One KV head, in a type and page size that the kernels support.
SIZES = replace(SMALL, model=ModelSizes(1, 256, 4, 1, 64, 256, 256), itemsize=2, dtype="bfloat16", page_size=16)
_PAGES = PageShape(1, 16, 64, "bfloat16")
_LATENT_PAGES = PageShape(1, 64, 192, "bfloat16", num_sides=1)
_ROOT = Path(__file__).resolve().parents[2]
_SEED = 7
_NO_GPU = "JAX finds no GPU"


@dataclass(frozen=True)
class _TimeLimit:
    seconds: float
    repeats: int


_ON_A_CARD, _INTERPRETED = _TimeLimit(20, 1000), _TimeLimit(300, 3)


@dataclass(frozen=True)
class Variant:
    """A kernel in the smallest size that uses one more of its features, with the tiling for it."""

    kernel: str
    problem: Callable[[], Problem]
    tiling: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        return implementation(self.kernel, GPU_BACKEND, self.tiling or None)


def _decode(tiling: dict[str, Any], context: int = 16, batch: int = 1, shape: PageShape = _PAGES, **about: Any) -> Variant:
    case = paged_attention.DecodeBenchmarkCase(batch, context, about.pop("num_heads", 4), shape, **about)
    return Variant("paged_attention", partial(paged_attention.problem, SIZES, case, _SEED), tiling)


def _write(*, writes: bool) -> Variant:
    tiling = {"tokens": 64, "stages": 2, "splits": 2, "writes": writes}
    return Variant(
        "write_and_attend", partial(write_and_attend.problem, SIZES, paged_attention.DecodeBenchmarkCase(3, 200, 4, _PAGES), _SEED), tiling
    )


def _prefill(num_new: int, num_cached: int = 0, **tiling: int) -> Variant:
    problem = partial(ragged_prefill_attention.problem, SIZES, ragged_prefill_attention.BenchmarkPrompt(num_new, num_cached), _SEED)
    return Variant("ragged_prefill_attention", problem, tiling)


def _prefill_of_latents(num_new: int, num_cached: int = 0) -> Variant:
    case = latent_prefill_attention.LatentBenchmarkCase(
        ragged_prefill_attention.BenchmarkPrompt(num_new, num_cached), latent_prefill_attention.LatentHeads(2, 128, 64, 64), 64, "bfloat16"
    )
    return Variant("latent_prefill_attention", partial(latent_prefill_attention.problem, SIZES, case, _SEED), {})


def _experts(kind: str, num_tokens: int = 8, **tiling: int) -> Variant:
    case = next(case for case in (*TINY, TINY_LOSSLESS) if case.format == kind)
    return Variant("grouped_matmul", partial(grouped_matmul.problem, SIZES, (case, num_tokens), _SEED), tiling)


_PLAIN, _SEVERAL_WARPGROUPS = (
    {"tokens": 64, "stages": 2, "splits": 1, "warpgroups": 1},
    {"tokens": 64, "stages": 2, "splits": 1, "warpgroups": 2},
)
VARIANTS: dict[str, Callable[[], Variant]] = {
    "decode, one tile": partial(_decode, _PLAIN),
    "decode, one token": partial(_decode, _PLAIN, context=1),
    "decode, more tiles than stages": partial(_decode, _PLAIN, context=300, batch=3),
    "decode, warpgroups in turns": partial(_decode, _SEVERAL_WARPGROUPS, context=300, batch=3),
    "decode, heads of 128": partial(_decode, _SEVERAL_WARPGROUPS, context=300, batch=3, shape=replace(_PAGES, head_size=128)),
    "decode, splits": partial(_decode, _SEVERAL_WARPGROUPS | {"splits": 3}, context=300, batch=3),
    "decode, several tokens": partial(_decode, _SEVERAL_WARPGROUPS, context=300, batch=3, tokens=4),
    "decode, float8": partial(_decode, _PLAIN, context=200, batch=3, shape=replace(_PAGES, dtype="float8_e4m3fn")),
    "decode, latents": partial(_decode, _PLAIN, context=200, batch=3, shape=_LATENT_PAGES, num_heads=16, value_size=128),
    "decode, latents of two warpgroups": partial(
        _decode, _PLAIN | {"splits": 2}, context=200, batch=3, shape=replace(_LATENT_PAGES, head_size=576), num_heads=128, value_size=512
    ),
    "write before decode": partial(_write, writes=False),
    "write within decode": partial(_write, writes=True),
    "prefill, one tile": partial(_prefill, 64),
    "prefill, many tiles": partial(_prefill, 512),
    "prefill, after a prefix": partial(_prefill, 32, 600),
    "prefill, latents": partial(_prefill_of_latents, 128),
    "prefill, latents after a prefix": partial(_prefill_of_latents, 64, 300),
    # Blocks that process several tiles each.
    "experts, bfloat16": partial(_experts, "bfloat16", rows=8, stages=2, blocks=3),
    "experts, fp8": partial(_experts, "fp8", rows=8, stages=2, blocks=3),
    "experts, int4": partial(_experts, "int4", rows=8, stages=2, blocks=3),
    "experts, lossless": partial(_experts, "lossless", rows=8, stages=2, blocks=3),
    "experts, many rows": partial(_experts, "bfloat16", 600),
}


def run(name: str, num_repeats: int, *, is_interpreted: bool) -> dict[str, Any]:
    """Checks one variant in this process. The result has 'errors', None if right, and the number of repeats that
    differed by a bit."""
    if is_interpreted:
        interpreter.have_threads()
    elif jax.devices()[0].platform != "gpu":
        raise SystemExit(f"{_NO_GPU}, only {jax.devices()[0].device_kind}: give --interpret")
    variant = VARIANTS[name]()
    function = variant.function
    if is_interpreted:
        interpreter.make_fast()
        function = partial(function, interpreted=True)
    problem = variant.problem()
    notes, failure = check_against_reference(function, problem)
    return notes | {"failure": failure, "num_different": _num_different(function, problem, num_repeats), "num_repeats": num_repeats}


def _num_different(function: Callable[..., Any], problem: Problem, num_repeats: int) -> int:
    """How many of the runs on the same inputs are not bit-equal to the first. Kernels add nothing in an order that may
    change."""
    check = list(problem.checks.values())[-1]
    call = jax.jit(partial(check.run, function))
    first = call(*check.arguments)
    bits = jnp.dtype(f"uint{8 * first.dtype.itemsize}")
    differs = jax.jit(lambda one: jnp.any(jax.lax.bitcast_convert_type(one, bits) != jax.lax.bitcast_convert_type(first, bits)))
    return int(np.sum([differs(call(*check.arguments)) for _ in range(num_repeats)]))


def run_in_process(name: str, arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """The same in a process of its own, killed after `seconds`."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu.smoke", "--one", name, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=_ROOT)
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer in {seconds:g} s", "took_s": round(time.monotonic() - began, 1)}
    took = {"took_s": round(time.monotonic() - began, 1)}
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found | took
    last = next(reversed([line for line in done.stderr.splitlines() if line.strip()]), "it said nothing")
    return {"failure": f"exit status {done.returncode}: {last[:300]}"} | took


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 1 where a variant is not right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.smoke", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"that a variant may take, starting and compiling included (default: {_ON_A_CARD.seconds:g}; "
        f"interpreted {_INTERPRETED.seconds:g})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help=f"runs that must be equal to the first, bit for bit (default: {_ON_A_CARD.repeats}; interpreted {_INTERPRETED.repeats})",
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="variants, such as 'decode*'")
    parser.add_argument("--interpret", action="store_true", help="by JAX's interpreter, on a CPU")
    parser.add_argument("--output", type=Path, help="file to write the results to, as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    usual = _INTERPRETED if options.interpret else _ON_A_CARD
    seconds = usual.seconds if options.seconds is None else options.seconds
    repeats = usual.repeats if options.repeats is None else options.repeats
    if options.one is not None:
        print(json.dumps(run(options.one, repeats, is_interpreted=options.interpret)))
        return
    chosen = [name for name in VARIANTS if any(fnmatch(name, pattern) for pattern in options.only)]
    if not chosen:
        parser.error(f"--only {' '.join(options.only)} names no variant: there are {', '.join(VARIANTS)}")
    forwarded = ["--repeats", str(repeats), *(["--interpret"] if options.interpret else [])]
    found = {}
    for name in chosen:
        found[name] = run_in_process(name, forwarded, seconds)
        # this process hasn't checked: it would have allocated the GPU's memory
        if _NO_GPU in (found[name]["failure"] or ""):
            parser.exit(2, f"{found[name]['failure'].partition(': ')[2]}\n")
        print(f"{name:34} {_line(found[name])}", flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    num_right = sum(map(_is_right, found.values()))
    print(f"{num_right} of {len(found)} are right")
    sys.exit(num_right < len(found))


def _is_right(found: dict[str, Any]) -> bool:
    return found["failure"] is None and not found["num_different"]


def _line(found: dict[str, Any]) -> str:
    if found["failure"] is not None:
        return f"WRONG  {found['took_s']:5.1f} s  {found['failure']}"
    state = f"WRONG  {found['num_different']} of {found['num_repeats']} repeats differ" if found["num_different"] else "right"
    return f"{state}  {found['took_s']:5.1f} s  error {found['relative_error']:.1e}, of a row {found['row_error']:.1e}"


if __name__ == "__main__":
    main()
