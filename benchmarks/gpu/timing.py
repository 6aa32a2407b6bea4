"""Device time of a JAX function: many calls in one program, each of which needs the one before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from benchmarks.gpu.measure import Times

Step = Callable[[Any, Any, int], Any]  # what the call before gave, what all calls share, the number of the inputs -> what this one gives
_LOOP_S = 0.02  # that the shorter loop should take
_MEASURED_S = 2.0  # that all loops may: what is far slower than expected is measured less often


def per_call(step: Step, carry: Any, shared: Any, num_inputs: int, expected_s: float, repeats: int) -> Times:
    """Seconds of one call of `step`, in steady state: a loop of n rounds through all inputs and one of 2n, and their difference, so that
    neither launch nor host is in it.

    Raises `ValueError` where that is not above zero. XLA runs a loop of a known length without asking the device each round, so n is static.
    """

    @partial(jax.jit, static_argnames="rounds")
    def run(carry: Any, shared: Any, rounds: int) -> Any:
        def one_round(_: int, carry: Any) -> Any:
            for number in range(num_inputs):
                carry = step(carry, shared, number)
            return carry

        return jax.lax.fori_loop(0, rounds, one_round, carry)

    rounds = max(2, min(200, int(_LOOP_S / (expected_s * num_inputs))))
    loops = [lambda n=n: jax.block_until_ready(run(carry, shared, rounds=n)) for n in (rounds, 2 * rounds)]
    for loop in loops:
        loop()
    took = _seconds(loops[0])
    repeats = max(2, min(repeats, int(_MEASURED_S / (3 * took))))
    return Times.of([(_seconds(loops[1]) - _seconds(loops[0])) / (rounds * num_inputs) for _ in range(repeats)])


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
