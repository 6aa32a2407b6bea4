"""This project's kernels: a row of a table each. Checked against its reference on fresh random inputs, then timed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import grouped, latents, paged, prefill, written
from benchmarks.gpu.absent import stand_in
from benchmarks.gpu.floors import DATASHEET
from benchmarks.gpu.measure import Found, Measure
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import per_call

# ||out - reference|| / ||reference||. bfloat16 operands give 1e-3 to 1e-2; float32 ones far less. Of one row, a head's result, it is up to
# twice that of all: a row alone that is wrong is lost in the norm of thousands.
WORST_ERROR = {"bfloat16": 1e-2, "float32": 1e-3}
WORST_ROW = {name: 2 * worst for name, worst in WORST_ERROR.items()}
_LIMIT_S = 75.0  # the first one starts CUDA, too
_EXPECTED = DATASHEET["h100"]
GPU_WAY = "mosaic_gpu"
Tiling = dict[str, int]


@dataclass(frozen=True)
class Kernel:
    """An op, as something to measure. `cases` are its sizes, each with the name that the report has."""

    name: str  # of the function
    cases: Callable[[Sizes], dict[str, Any]]
    problem: Callable[[Sizes, Any, int], Problem]  # of a case, with a seed
    tilings: Callable[[Sizes, Any], list[Tiling]]  # that are worth a try
    folder: str = ""  # in pallas_kernels, if it hasn't the function's name
    more_cases: Callable[[Sizes], dict[str, Any]] = lambda _: {}  # that tilings are tried in besides
    # Of the GPU's kernel, which are measured beside one another, with the tiling of each; if there are none it chooses its own.
    versions: Mapping[str, Callable[[Sizes, Any], Tiling]] = field(default_factory=dict)

    def tuned_cases(self, sizes: Sizes) -> dict[str, Any]:
        return self.cases(sizes) | self.more_cases(sizes)


KERNELS = (
    Kernel("paged_attention", paged.cases, paged.problem, paged.tilings),
    Kernel("ragged_prefill_attention", prefill.cases, prefill.problem, prefill.tilings),
    Kernel("latent_prefill_attention", latents.cases, latents.problem, latents.tilings),
    Kernel("grouped_matmul", grouped.cases, grouped.problem, grouped.tilings),
    Kernel("write_and_attend", written.cases, written.problem, written.tilings, "paged_attention", written.all_cases, written.VERSIONS),
)


def measures(sizes: Sizes, way: str, seed: int) -> list[Measure]:
    """Every kernel in every size in one way of running it."""
    return [
        Measure(
            kernel.name, ", ".join(filter(None, (way, version))), case, partial(_measure, kernel, sizes, way, case, seed, version), _LIMIT_S
        )
        for kernel in KERNELS
        for case in kernel.cases(sizes)
        for version in ((way == GPU_WAY and kernel.versions) or ("",))
    ]


def tunings(sizes: Sizes, seed: int) -> list[Measure]:
    """Every GPU kernel in every size with every tiling."""
    return [
        Measure(
            kernel.name,
            GPU_WAY,
            f"{case}, {', '.join(f'{name} {value}' for name, value in tiling.items())}",
            partial(_tune, kernel, sizes, case, seed, tiling),
            _LIMIT_S,
        )
        for kernel in KERNELS
        for case, about in kernel.tuned_cases(sizes).items()
        for tiling in kernel.tilings(sizes, about)
    ]


def implementation(name: str, way: str, tiling: Tiling | None) -> Callable[..., Any]:
    """The op in this way. The GPU kernel is taken from its own module, which takes a tiling. Raises `ImportError` where there is none."""
    folder = next((kernel.folder for kernel in KERNELS if kernel.name == name), "") or name
    if way == GPU_WAY:
        module = importlib.import_module(f"pallas_kernels.{folder}.mosaic_gpu")
        options = {} if tiling is None else {"tiling": module.Tiling(**tiling)}
        return partial(getattr(module, name), **options)
    stand_in()
    op = getattr(importlib.import_module(f"pallas_kernels.{folder}.op"), name)
    return partial(op, backend=way)


def _measure(kernel: Kernel, sizes: Sizes, way: str, case: str, seed: int, version: str) -> Iterator[Found]:
    about = kernel.cases(sizes)[case]
    function = implementation(kernel.name, way, kernel.versions[version](sizes, about) if version else None)
    yield measured(function, kernel.problem(sizes, about, seed), sizes, case, {})


def _tune(kernel: Kernel, sizes: Sizes, case: str, seed: int, tiling: Tiling) -> Iterator[Found]:
    function, problem = implementation(kernel.name, GPU_WAY, tiling), _problem_for_tilings(kernel, sizes, case, seed)
    yield measured(function, problem, sizes, case, {"tiling": tiling, "shape": problem.shape})


@lru_cache(maxsize=1)
def _problem_for_tilings(kernel: Kernel, sizes: Sizes, case: str, seed: int) -> Problem:
    """The same for all tilings of a size, with the check that is nearest to what is timed."""
    problem = kernel.problem(sizes, kernel.tuned_cases(sizes)[case], seed)
    name, check = list(problem.checks.items())[-1]
    return replace(problem, checks={name: replace(check, expected=cache(check.expected))})


def measured(function: Callable[..., Any], problem: Problem, sizes: Sizes, case: str, notes: dict[str, Any]) -> Found:
    """Checked, then timed: what is wrong has no time."""
    about, failure = checked(function, problem)
    notes = notes | about
    if failure is not None:
        return Found(case, work=problem.work, notes=notes, failure=failure)
    expected_s = _EXPECTED.floor(problem.work)
    step = partial(problem.step, function)
    times, program = per_call(step, problem.carry, problem.shared, problem.inputs, max(expected_s, 4e-6), sizes.repeats)
    return Found(case, times, problem.work, notes | {"program": program})


def checked(function: Callable[..., Any], problem: Problem) -> tuple[dict[str, Any], str | None]:
    """The largest errors of its checks, and whether runs differed; and what is wrong, None where nothing is."""
    notes: dict[str, Any] = {}
    for name, check in problem.checks.items():
        found, is_same_again, dtype = _run_twice(jax.jit(partial(check.run, function)), check.arguments)
        expected = check.expected()
        error, by_row = relative_error(found, expected), row_errors(found, expected)
        for kind, value in (("relative_error", error), ("row_error", float(by_row.max()))):
            notes[kind] = value if kind not in notes or math.isnan(value) else max(value, notes[kind])
        if not error <= WORST_ERROR[dtype]:
            return notes, f"{name}: relative error {error:.1e}"
        if not by_row.max() <= WORST_ROW[dtype]:
            place = np.unravel_index(np.argmax(by_row), by_row.shape)
            return notes, f"{name}: row {', '.join(map(str, place))} has a relative error of {by_row.max():.1e}"
        if not is_same_again:  # the order of sums may differ; a race may be behind it
            notes["differs_between_runs"] = True
    return notes, None


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected||; NaN where anything is NaN that mustn't be."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        raise ValueError(f"the result is {found.shape}, not {expected.shape}")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The same of each row, the last axis: over its own norm, or over a tenth of the rows' root mean square where that is more, as of a row that is
    to be zero."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    norms = np.linalg.norm(expected, axis=-1)
    return np.linalg.norm(found - expected, axis=-1) / np.maximum(norms, 0.1 * np.sqrt(np.mean(norms**2)))


def _run_twice(run: Callable[..., jax.Array], arguments: tuple[Any, ...]) -> tuple[np.ndarray, bool, str]:
    """The result, whether a second run gave the same, and its type. The memory that results are written to is NaN before."""
    shape = jax.eval_shape(run, *arguments)
    results = []
    for _ in range(2):
        scribbled = [jnp.full(shape.shape, jnp.nan, shape.dtype) for _ in range(3)]
        jax.block_until_ready(scribbled)
        del scribbled
        results.append(np.asarray(run(*arguments).astype(jnp.float32)))
    return results[0], np.array_equal(results[0], results[1], equal_nan=True), shape.dtype.name
