"""Everything there is to measure, the most valuable first."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu import ceilings, kernels, paged, peers, prefill
from benchmarks.gpu.measure import Found, Measure
from benchmarks.gpu.sizes import DECODE, FULL, PREFILL, SMALL, Sizes

_COMPILED_S, _ATTENTION_S = 170.0, 60.0  # for whole models most of it is compiling


def catalog(*, is_small: bool, seed: int, is_tuning: bool) -> list[Measure]:
    sizes = SMALL if is_small else FULL
    if is_tuning:
        return [*ceilings.measures(sizes), *kernels.tunings(sizes, seed)]
    first, *others = sizes.kernel_ways
    return [
        *ceilings.measures(sizes),
        *kernels.measures(sizes, first, seed),
        *_engine(sizes, first, seed),
        *peers.measures(sizes, seed),
        *(measure for way in others for measure in kernels.measures(sizes, way, seed)),
        *_torch_attention(sizes, "torch sdpa"),
        *_transformers(sizes),
        *_torch_attention(sizes, "torch flex"),
        *(measure for way in others for measure in _engine(sizes, way, seed)),
    ]


def _engine(sizes: Sizes, way: str, seed: int) -> list[Measure]:
    return [
        Measure(DECODE, way, "", _later("engine", "decode_steps", sizes, way, seed), _COMPILED_S),
        Measure(PREFILL, way, "", _later("engine", "prefill_steps", sizes, way, seed), _COMPILED_S),
    ]


def _torch_attention(sizes: Sizes, way: str) -> list[Measure]:
    of_prompts = [
        Measure(
            "ragged_prefill_attention", way, case, _later("torch_attention", "of_a_prompt", sizes, case, size, way), _ATTENTION_S, "torch"
        )
        for case, size in prefill.plain_cases(sizes).items()
    ]
    return of_prompts + [
        Measure("paged_attention", way, case, _later("torch_attention", "of_a_step", sizes, case, *size, way), _ATTENTION_S, "torch")
        for case, size in paged.plain_cases(sizes).items()
    ]


def _transformers(sizes: Sizes) -> list[Measure]:
    return [
        Measure(PREFILL, "transformers", "", _later("torch_model", "prefill_steps", sizes), _ATTENTION_S, "torch"),
        Measure(DECODE, "transformers", "", _later("torch_model", "decode_steps", sizes), _COMPILED_S, "torch"),
    ]


def _later(module: str, function: str, *arguments: Any) -> partial[Iterator[Found]]:
    """Of a room that needs packages which a machine may lack: imported when it is its turn, so that without them all else runs."""
    return partial(_run, module, function, *arguments)


def _run(module: str, function: str, *arguments: Any) -> Iterator[Found]:
    yield from getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(*arguments)
