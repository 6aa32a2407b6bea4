"""Everything that can be measured, the most valuable first."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu import cudnn_attention, kernels, paged_attention, peak_rates, ragged_prefill_attention
from benchmarks.gpu.measure import GpuMeasure, RowResult
from benchmarks.gpu.sizes import DECODE, FULL, PREFILL, SMALL, BenchmarkSizes

_COMPILED_S, _ATTENTION_S = 170.0, 60.0  # for whole models mostly compilation
_INTERPRETED = 4.0  # times as long a limit for JAX's interpreter on a CPU, which another process may be using too


def catalog(*, is_small: bool, seed: int, is_tuning: bool) -> list[GpuMeasure]:
    sizes = SMALL if is_small else FULL
    if is_tuning:
        return [*peak_rates.measures(sizes), *kernels.tunings(sizes, seed)]
    first, *others = sizes.kernel_ways
    measures = [
        *peak_rates.measures(sizes),
        *kernels.measures(sizes, first, seed),
        *_engine(sizes, first, seed),
        *cudnn_attention.measures(sizes, seed),
        *(measure for way in others for measure in kernels.measures(sizes, way, seed)),
        *_torch_attention(sizes, "torch sdpa"),
        *_transformers(sizes),
        *_torch_attention(sizes, "torch flex"),
        *(measure for way in others for measure in _engine(sizes, way, seed)),
    ]
    return [replace(measure, limit_s=_INTERPRETED * measure.limit_s) for measure in measures] if is_small else measures


def _engine(sizes: BenchmarkSizes, way: str, seed: int) -> list[GpuMeasure]:
    return [
        GpuMeasure(DECODE, way, "", _deferred("engine", "decode_steps", sizes, way, seed), _COMPILED_S),
        GpuMeasure(PREFILL, way, "", _deferred("engine", "prefill_steps", sizes, way, seed), _COMPILED_S),
    ]


def _torch_attention(sizes: BenchmarkSizes, way: str) -> list[GpuMeasure]:
    of_prompts = [
        GpuMeasure(
            "ragged_prefill_attention",
            way,
            case,
            _deferred("torch_attention", "measure_prefill", sizes, case, size, way),
            _ATTENTION_S,
            "torch",
        )
        for case, size in ragged_prefill_attention.plain_cases(sizes).items()
    ]
    return of_prompts + [
        GpuMeasure(
            "paged_attention", way, case, _deferred("torch_attention", "measure_decode", sizes, case, *size, way), _ATTENTION_S, "torch"
        )
        for case, size in paged_attention.plain_cases(sizes).items()
    ]


def _transformers(sizes: BenchmarkSizes) -> list[GpuMeasure]:
    return [
        GpuMeasure(PREFILL, "transformers", "", _deferred("torch_model", "prefill_steps", sizes), _ATTENTION_S, "torch"),
        GpuMeasure(DECODE, "transformers", "", _deferred("torch_model", "decode_steps", sizes), _COMPILED_S, "torch"),
    ]


def _deferred(module: str, function: str, *arguments: Any) -> partial[Iterator[RowResult]]:
    """A measure of a module whose packages a machine may lack. It is imported when it runs, so that everything else
    runs without them."""
    return partial(_run, module, function, *arguments)


def _run(module: str, function: str, *arguments: Any) -> Iterator[RowResult]:
    yield from getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(*arguments)
