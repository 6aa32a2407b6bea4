"""What JAX has of its own for attention: cuDNN's, over keys and values that lie together, without pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import paged, prefill
from benchmarks.gpu.floors import Work
from benchmarks.gpu.kernels import measured
from benchmarks.gpu.measure import Found, Measure
from benchmarks.gpu.problem import Check, Problem, inputs_in_turns, only_if_finite
from benchmarks.gpu.sizes import Sizes

_LIMIT_S = 60.0


def measures(sizes: Sizes, seed: int) -> list[Measure]:
    """In the small sizes XLA's stands for it: a CPU has no cuDNN."""
    way = f"jax {_implementation(sizes)}"
    return [
        *(
            Measure(
                "paged_attention",
                way,
                case,
                partial(_measure, sizes, case, sizes.decode_attention(*about), (about[0], 1, about[1]), seed),
                _LIMIT_S,
            )
            for case, about in paged.plain_cases(sizes).items()
        ),
        *(
            Measure(
                "ragged_prefill_attention",
                way,
                case,
                partial(_measure, sizes, case, sizes.prefill_attention(about), (1, about, about), seed),
                _LIMIT_S,
            )
            for case, about in prefill.plain_cases(sizes).items()
        ),
    ]


def _implementation(sizes: Sizes) -> Literal["xla", "cudnn"]:
    return "xla" if sizes.is_small else "cudnn"


def _measure(sizes: Sizes, case: str, work: Work, shape: tuple[int, int, int], seed: int) -> Iterator[Found]:
    batch, queries, context = shape
    # The last query sees everything: of one query alone nothing is to be masked.
    attend = partial(jax.nn.dot_product_attention, is_causal=queries > 1, implementation=_implementation(sizes))
    yield measured(attend, _problem(sizes, work, batch, queries, context, seed), sizes, case, {})


def _problem(sizes: Sizes, work: Work, batch: int, queries: int, context: int, seed: int) -> Problem:
    model, num_inputs = sizes.model, inputs_in_turns(work, sizes)
    make = jax.jit(partial(jax.random.normal, dtype=sizes.dtype), static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 2 * num_inputs + 1))
    q = make(next(keys), (batch, queries, model.num_heads, model.head_size))
    shape = (batch, context, model.num_kv_heads, model.head_size)
    inputs = [(make(next(keys), shape), make(next(keys), shape)) for _ in range(num_inputs)]

    def step(function: Callable[..., Any], q: jax.Array, _: None, own: Any) -> jax.Array:
        return function(q, *own, scale=0.2 * (context / model.head_size) ** 0.5)

    first = jnp.arange(min(queries, 32))  # of the queries: what the plain way makes of all has the size of their squares

    def expected() -> np.ndarray:
        k, v = (a[:, : len(first)] if queries > 1 else a for a in inputs[0])
        wide = (a.astype(jnp.float32) for a in (q[:, first], k, v))
        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.nn.dot_product_attention(*wide, is_causal=queries > 1, implementation="xla"))

    def run(function: Callable[..., Any], *arguments: jax.Array) -> jax.Array:
        out = function(*arguments)
        return only_if_finite(out[:, first], out)

    check = Check(run, (q, *inputs[0]), expected)
    return Problem(work, q, None, inputs, step, {"random inputs": check}, {})
