"""A kernel's inputs: those it is checked with, and several that it is timed with, interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.roofline import RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes

_MAX_INPUTS = 64


@dataclass(frozen=True)
class KernelCheck:
    run: Callable[..., jax.Array]  # from the function and the arguments to the result, or a part of it
    arguments: tuple[Any, ...]
    expected: Callable[[], np.ndarray]  # the reference's result


@dataclass(frozen=True)
class Problem:
    """`step` calls the function once, with the result of the call before (`carry` at first), what all calls share, and
    inputs of its own."""

    work: RooflineWork  # of one call
    carry: Any
    shared: Any
    inputs: Sequence[Any]
    step: Callable[[Callable[..., Any], Any, Any, Any], Any]
    checks: dict[str, KernelCheck]
    shape: dict[str, Any]  # the key of a tuned tiling


def interleaved_inputs(work: RooflineWork, sizes: BenchmarkSizes) -> int:
    """Sets of inputs that together exceed the GPU's cache, so that each call reads its own from memory."""
    return max(1, min(_MAX_INPUTS, math.ceil(sizes.cache_bytes / work.num_bytes)))


def only_if_finite(chosen: jax.Array, whole: jax.Array) -> jax.Array:
    """The compared part of a result, NaN where any of the result is."""
    return jnp.where(jnp.isfinite(whole).all(), chosen, jnp.nan)
