"""A kernel's inputs: those it is checked with, and several that it is timed with in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.floors import Work
from benchmarks.gpu.sizes import Sizes

_MOST_INPUTS = 64


@dataclass(frozen=True)
class Check:
    run: Callable[..., jax.Array]  # of the function and the arguments: the result, or a part of it
    arguments: tuple[Any, ...]
    expected: Callable[[], np.ndarray]  # what the reference makes of them


@dataclass(frozen=True)
class Problem:
    """`step` calls the function once, with what the call before gave (`carry` at first), what all calls share, and inputs of its own."""

    work: Work  # of a call
    carry: Any
    shared: Any
    inputs: Sequence[Any]
    step: Callable[[Callable[..., Any], Any, Any, Any], Any]
    checks: dict[str, Check]
    shape: dict[str, Any]  # by which a tiling is kept


def inputs_in_turns(work: Work, sizes: Sizes) -> int:
    """Sets of inputs that don't fit in the GPU's cache together, so that each call reads its own from memory."""
    return max(1, min(_MOST_INPUTS, math.ceil(sizes.cache_bytes / work.num_bytes)))


def only_if_finite(chosen: jax.Array, whole: jax.Array) -> jax.Array:
    """What is compared of a result, NaN where any of it is."""
    return jnp.where(jnp.isfinite(whole).all(), chosen, jnp.nan)
