"""Device time of a JAX function: many calls in one program, each of which depends on the one before it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import compiled_program
from benchmarks.gpu.measure import CallTimes

Step = Callable[[Any, Any, Any], Any]  # result of the call before, what all calls share, inputs of its own -> result
_LOOP_S = 0.01  # duration of a loop
_MEASURED_S = 2.0  # duration of all loops: work that is far slower than expected is measured less often


def per_call(
    step: Step, carry: Any, shared: Any, inputs: Sequence[Any], expected_s: float, repeats: int
) -> tuple[CallTimes, dict[str, Any]]:
    """Seconds of one call of `step`, in steady state. A loop of several rounds through all inputs is launched several
    times in a row, less one launch, so that host time before and after isn't counted. Also a description of the loop's
    program, with the number of `calls` of a round.

    Raises `ValueError` where the time is not above zero. XLA runs a loop of known length without asking the device each
    round, so it is static.
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
    times = CallTimes.of([difference / (more * rounds * len(inputs)) for difference in differences])
    return times, {"calls": len(inputs)} | compiled_program.describe_program(loop.as_text() or "")


def chain(step: Step, rounds: int) -> Callable[[Any, Any, Sequence[Any]], Any]:
    """A function of the carry, what is shared, and each call's own inputs, which runs `rounds` rounds of calls."""
    once = jax.jit(step)  # traced, and its kernels compiled, once for all inputs

    def loop(carry: Any, shared: Any, inputs: Sequence[Any]) -> Any:
        def one_round(_: int, carry: Any) -> Any:
            for own in inputs:
                carry = once(carry, shared, own)
            return carry

        return jax.lax.fori_loop(0, rounds, one_round, carry)

    return loop


def per_launch(launch: Callable[[], Any], launches: int, repeats: int) -> CallTimes:
    """Seconds of one launch of a program among `launches` that follow one another; the host waits for the last
    alone."""

    def run() -> None:
        for _ in range(launches):
            out = launch()
        jax.block_until_ready(out)

    run()
    repeats = max(2, min(repeats, int(_MEASURED_S / _seconds(run))))
    return CallTimes.of([_seconds(run) / launches for _ in range(repeats)])


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
