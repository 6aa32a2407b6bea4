"""A function compiled as one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Called as it is each of its operations would be compiled by itself, which takes longer than to run it. Keywords that are no arrays are static."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        arrays = {name: value for name, value in options.items() if isinstance(value, (jax.Array, np.ndarray))}
        others = {name: value for name, value in options.items() if name not in arrays}
        return jax.jit(functools.partial(function, **others))(*arguments, **arrays)

    return call
