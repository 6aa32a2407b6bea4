"""Device time of a JAX function: many calls in one program, each of which needs the one before it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import compiled
from benchmarks.gpu.measure import Times

Step = Callable[[Any, Any, Any], Any]  # what the call before gave, what all calls share, inputs of its own -> what this one gives
_LOOP_S = 0.01  # that a loop should take
_MEASURED_S = 2.0  # that all loops may: what is far slower than expected is measured less often


def per_call(step: Step, carry: Any, shared: Any, inputs: Sequence[Any], expected_s: float, repeats: int) -> tuple[Times, dict[str, Any]]:
    """Seconds of one call of `step`, in steady state: a loop of several rounds through all inputs, launched several times in a row less launched
    once, so that what the host does before and after isn't in it. And what the loop's program is, with how many `calls` a round of it has.

    Raises `ValueError` where that is not above zero. XLA runs a loop of a known length without asking the device each round, so it is static.
    """
    rounds = max(2, min(200, int(_LOOP_S / (expected_s * len(inputs)))))
    traced = jax.jit(chain(step, rounds), donate_argnums=0)  # so that what calls update in place isn't copied
    loop = traced.lower(carry, shared, inputs).compile()

    def launch(times: int) -> None:
        out = jax.tree.map(jnp.copy, carry)
        for _ in range(times):
            out = loop(out, shared, inputs)
        jax.block_until_ready(out)

    launch(1)
    took = _seconds(partial(launch, 1))
    more = max(2, math.ceil(_LOOP_S / took))
    repeats = max(2, min(repeats, int(_MEASURED_S / ((2 + more) * took))))
    differences = (_seconds(partial(launch, 1 + more)) - _seconds(partial(launch, 1)) for _ in range(repeats))
    times = Times.of([difference / (more * rounds * len(inputs)) for difference in differences])
    return times, {"calls": len(inputs)} | compiled.about(loop.as_text() or "")


def chain(step: Step, rounds: int) -> Callable[[Any, Any, Sequence[Any]], Any]:
    """A function of the carry, what is shared, and each call's own inputs: so many rounds of calls."""
    once = jax.jit(step)  # traced, and its kernels compiled, once for all inputs

    def loop(carry: Any, shared: Any, inputs: Sequence[Any]) -> Any:
        def one_round(_: int, carry: Any) -> Any:
            for own in inputs:
                carry = once(carry, shared, own)
            return carry

        return jax.lax.fori_loop(0, rounds, one_round, carry)

    return loop


def per_launch(launch: Callable[[], Any], launches: int, repeats: int) -> Times:
    """Seconds of one launch of a program among so many that follow one another; the host waits for the last alone."""

    def run() -> None:
        for _ in range(launches):
            out = launch()
        jax.block_until_ready(out)

    run()
    repeats = max(2, min(repeats, int(_MEASURED_S / _seconds(run))))
    return Times.of([_seconds(run) / launches for _ in range(repeats)])


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
