"""On a calibrated machine steps take as long as is predicted, to a quarter. Measured, so that it wants the machine to itself: `make test-measured`."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from jaxinfer.architecture.known_models import read_shape
from jaxinfer.planner.calibration import NUM_ROUNDS, Calibration, CalibrationCase, predicted
from jaxinfer.planner.step_bench import decode_bench, prefill_bench, timed
from jaxinfer.planner.target import CPU, Target
from jaxinfer.planner.target_model import TargetModel
from sharding.layout import Parallel

TOLERANCE = 0.25
TRIES = 3  # a neighbour who came in between spoils one


def steps() -> Iterator[CalibrationCase]:
    """Of SmolLM2, on one device and on virtual ones."""
    for dtype, tp in (("bfloat16", 1), ("float32", 1), ("bfloat16", 2), ("bfloat16", 4)):
        target = Target(CPU, tp)
        shapes = TargetModel(read_shape("smollm2-135m"), target, dtype=dtype)
        placement = shapes.place_shared(Parallel(tp))
        shape = placement.decode
        for batch in (1, 8, 32):
            yield CalibrationCase(f"{dtype}, tp={tp}, decode {batch}", shape, decode_bench(shape, target, batch, 64))
        for num_tokens in (128, 512):
            yield CalibrationCase(f"{dtype}, tp={tp}, prefill {num_tokens}", shape, prefill_bench(placement.prefill, target, num_tokens))


@pytest.mark.measured
def test_steps_take_what_is_predicted() -> None:
    assert jax.devices()[0].platform == "cpu"
    of, calibration = list(steps()), Calibration()
    errors: dict[str, float] = {}
    for _ in range(TRIES):
        # All in the same turns: what else the machine does meets both sides alike.
        taken = timed([*calibration.runs, *(one.bench.run for one in of)], NUM_ROUNDS)
        hardware, _ = calibration.result(taken[: -len(of)])
        seconds = taken[-len(of) :]
        errors = {one.name: predicted(one, hardware) / measured - 1 for one, measured in zip(of, seconds, strict=True)}
        print({name: f"{error:+.0%}" for name, error in errors.items()})
        if all(abs(error) <= TOLERANCE for error in errors.values()):
            return
    pytest.fail(f"predicted, less what was measured, as a share of it: {errors}")
