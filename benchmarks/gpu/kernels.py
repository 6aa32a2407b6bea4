"""This project's kernels, a row of a table each: checked against the reference on fresh random inputs, then timed."""

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

from benchmarks.gpu import grouped_matmul, latent_prefill_attention, paged_attention, ragged_prefill_attention, write_and_attend
from benchmarks.gpu.measure import GpuMeasure, RowResult
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.roofline import DATASHEET
from benchmarks.gpu.sizes import BenchmarkSizes
from benchmarks.gpu.stand_ins import stand_in
from benchmarks.gpu.timing import per_call

# ||out - reference|| / ||reference||. bfloat16 operands give 1e-3 to 1e-2; float32 ones far less. For one row, a
# head's result, it is up to twice that of all. One wrong row would be lost in the norm of thousands.
WORST_ERROR = {"bfloat16": 1e-2, "float32": 1e-3}
WORST_ROW = {name: 2 * worst for name, worst in WORST_ERROR.items()}
_LIMIT_S = 75.0  # the first one also starts CUDA
_EXPECTED = DATASHEET["h100"]
GPU_BACKEND = "mosaic_gpu"
Tiling = dict[str, int]
_TILING_CLASSES = {  # in each folder's mosaic_gpu.py, which imports packages that this module must not need
    "paged_attention": "DecodeTiling",
    "ragged_prefill_attention": "PrefillTiling",
    "latent_prefill_attention": "PrefillTiling",
    "grouped_matmul": "GroupedMatmulTiling",
}


@dataclass(frozen=True)
class KernelBenchmark:
    """An op to measure. `cases` are its sizes, by the name that the report shows."""

    name: str  # of the op's function
    cases: Callable[[BenchmarkSizes], dict[str, Any]]
    problem: Callable[[BenchmarkSizes, Any, int], Problem]  # the inputs of a case, from a seed
    tilings: Callable[[BenchmarkSizes, Any], list[Tiling]]  # worth trying
    folder: str = ""  # in pallas_kernels, if its name differs from the op's
    more_cases: Callable[[BenchmarkSizes], dict[str, Any]] = lambda _: {}  # further cases to tune
    # Versions of the GPU kernel that are measured side by side, with the tiling of each. If there are none the kernel
    # chooses its own.
    versions: Mapping[str, Callable[[BenchmarkSizes, Any], Tiling]] = field(default_factory=dict)

    def tuned_cases(self, sizes: BenchmarkSizes) -> dict[str, Any]:
        return self.cases(sizes) | self.more_cases(sizes)


KERNELS = (
    KernelBenchmark("paged_attention", paged_attention.cases, paged_attention.problem, paged_attention.tilings),
    KernelBenchmark(
        "ragged_prefill_attention", ragged_prefill_attention.cases, ragged_prefill_attention.problem, ragged_prefill_attention.tilings
    ),
    KernelBenchmark(
        "latent_prefill_attention", latent_prefill_attention.cases, latent_prefill_attention.problem, latent_prefill_attention.tilings
    ),
    KernelBenchmark("grouped_matmul", grouped_matmul.cases, grouped_matmul.problem, grouped_matmul.tilings),
    KernelBenchmark(
        "write_and_attend",
        write_and_attend.cases,
        write_and_attend.problem,
        write_and_attend.tilings,
        "paged_attention",
        write_and_attend.all_cases,
        write_and_attend.VERSIONS,
    ),
)


def measures(sizes: BenchmarkSizes, way: str, seed: int) -> list[GpuMeasure]:
    """Every kernel in every size with one backend."""
    return [
        GpuMeasure(
            kernel.name, ", ".join(filter(None, (way, version))), case, partial(_measure, kernel, sizes, way, case, seed, version), _LIMIT_S
        )
        for kernel in KERNELS
        for case in kernel.cases(sizes)
        for version in ((way == GPU_BACKEND and kernel.versions) or ("",))
    ]


def tunings(sizes: BenchmarkSizes, seed: int) -> list[GpuMeasure]:
    """Every GPU kernel in every size with every tiling."""
    return [
        GpuMeasure(
            kernel.name,
            GPU_BACKEND,
            f"{case}, {', '.join(f'{name} {value}' for name, value in tiling.items())}",
            partial(_tune, kernel, sizes, case, seed, tiling),
            _LIMIT_S,
        )
        for kernel in KERNELS
        for case, about in kernel.tuned_cases(sizes).items()
        for tiling in kernel.tilings(sizes, about)
    ]


def implementation(name: str, way: str, tiling: Tiling | None) -> Callable[..., Any]:
    """The op with this backend. The GPU kernel comes from its own module, which accepts a tiling. Raises `ImportError`
    where there is none."""
    folder = next((kernel.folder for kernel in KERNELS if kernel.name == name), "") or name
    if way == GPU_BACKEND:
        module = importlib.import_module(f"pallas_kernels.{folder}.mosaic_gpu")
        options = {} if tiling is None else {"tiling": getattr(module, _TILING_CLASSES[folder])(**tiling)}
        return partial(getattr(module, name), **options)
    stand_in()
    op = getattr(importlib.import_module(f"pallas_kernels.{folder}.op"), name)
    return partial(op, backend=way)


def _measure(kernel: KernelBenchmark, sizes: BenchmarkSizes, way: str, case: str, seed: int, version: str) -> Iterator[RowResult]:
    about = kernel.cases(sizes)[case]
    function = implementation(kernel.name, way, kernel.versions[version](sizes, about) if version else None)
    yield measure_function(function, kernel.problem(sizes, about, seed), sizes, case, {})


def _tune(kernel: KernelBenchmark, sizes: BenchmarkSizes, case: str, seed: int, tiling: Tiling) -> Iterator[RowResult]:
    function, problem = implementation(kernel.name, GPU_BACKEND, tiling), _problem_for_tilings(kernel, sizes, case, seed)
    yield measure_function(function, problem, sizes, case, {"tiling": tiling, "shape": problem.shape})


@lru_cache(maxsize=1)
def _problem_for_tilings(kernel: KernelBenchmark, sizes: BenchmarkSizes, case: str, seed: int) -> Problem:
    """The same inputs for all tilings of a size, with the check that is nearest to the timed case."""
    problem = kernel.problem(sizes, kernel.tuned_cases(sizes)[case], seed)
    name, check = list(problem.checks.items())[-1]
    return replace(problem, checks={name: replace(check, expected=cache(check.expected))})


def measure_function(function: Callable[..., Any], problem: Problem, sizes: BenchmarkSizes, case: str, notes: dict[str, Any]) -> RowResult:
    """Checks, then times: a wrong result has no time."""
    about, failure = check_against_reference(function, problem)
    notes = notes | about
    if failure is not None:
        return RowResult(case, work=problem.work, notes=notes, failure=failure)
    expected_s = _EXPECTED.floor(problem.work)
    step = partial(problem.step, function)
    times, program = per_call(step, problem.carry, problem.shared, problem.inputs, max(expected_s, 4e-6), sizes.repeats)
    return RowResult(case, times, problem.work, notes | {"program": program})


def check_against_reference(function: Callable[..., Any], problem: Problem) -> tuple[dict[str, Any], str | None]:
    """The largest errors of the checks, whether runs differed, and what is wrong, None where nothing is."""
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
        if not is_same_again:  # the order of sums may differ, or there may be a race
            notes["differs_between_runs"] = True
    return notes, None


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected||; NaN where anything is NaN that must not be."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        raise ValueError(f"the result is {found.shape}, not {expected.shape}")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The relative error of each row, the last axis: over its own norm, or over a tenth of the rows' root mean square
    where that is more, as for a row that must be zero."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    norms = np.linalg.norm(expected, axis=-1)
    return np.linalg.norm(found - expected, axis=-1) / np.maximum(norms, 0.1 * np.sqrt(np.mean(norms**2)))


def _run_twice(run: Callable[..., jax.Array], arguments: tuple[Any, ...]) -> tuple[np.ndarray, bool, str]:
    """The result, whether a second run gave the same, and its type. The memory of the results is NaN before."""
    shape = jax.eval_shape(run, *arguments)
    results = []
    for _ in range(2):
        scribbled = [jnp.full(shape.shape, jnp.nan, shape.dtype) for _ in range(3)]
        jax.block_until_ready(scribbled)
        del scribbled
        results.append(np.asarray(run(*arguments).astype(jnp.float32)))
    return results[0], np.array_equal(results[0], results[1], equal_nan=True), shape.dtype.name
