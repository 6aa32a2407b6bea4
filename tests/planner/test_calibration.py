"""`jaxinfer plan --calibrate`: a processor's figures from measured times. How well they predict is tests/planner/test_step_times.py's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxinfer.planner import calibration
from jaxinfer.planner import matmul_bench as products
from jaxinfer.planner.calibration import CalibrationCase, CalibrationFit, fit, predicted, with_products
from jaxinfer.planner.step_bench import StepBench
from jaxinfer.planner.target import CPU, Target, calibration_path
from jaxinfer.planner.target_model import TargetModel
from server import planning
from server.cli import main
from sharding.cost_model import Step
from sharding.hardware import Hardware
from sharding.layout import Parallel
from tests import tiny_model

RATES = {"float32": {1: 10e9, 32: 100e9, 512: 150e9}, "bfloat16": {1: 20e9, 32: 150e9, 512: 300e9}}


def cases() -> Iterator[CalibrationCase]:
    """That are never run."""
    for tp, config in ((1, {}), (1, {"hidden_size": 256, "num_hidden_layers": 7, "vocab_size": 8192}), (2, {}), (2, {"hidden_size": 512})):
        shapes = TargetModel(tiny_model.CONFIG | config, Target(CPU, 1))
        shape = shapes.place_shared(Parallel(tp)).decode
        for role, num_sequences, num_tokens, context in (("decode", 1, 1, 64), ("decode", 32, 1, 2000), ("prefill", 1, 300, 300)):
            step = Step(role, num_sequences, num_tokens, context)  # type: ignore[arg-type]
            yield CalibrationCase(f"{role} {num_sequences}", shape, StepBench(step, lambda: None))


def test_figures_that_steps_were_made_of_are_found_again() -> None:
    truth = replace(
        with_products(RATES),
        attention_share=0.05,
        activation_bandwidth=7e9,
        link_seconds=20e-6,
        link_bandwidth=2e9,
        kernel_seconds=3e-6,
        step_seconds=80e-6,
    )
    of = list(cases())
    found = fit(with_products(RATES), of, [predicted(case, truth) for case in of])
    for name in ("attention_share", "activation_bandwidth", "link_seconds", "link_bandwidth", "kernel_seconds", "step_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    assert found.product_rates == RATES
    assert found.is_measured


def test_without_a_second_device_links_stay_what_they_are_taken_for() -> None:
    of = [case for case in cases() if case.shape.layout.tp == 1]
    known = with_products(RATES)
    found = fit(known, of, [predicted(case, known) for case in of])
    assert (found.link_seconds, found.link_bandwidth) == (known.link_seconds, known.link_bandwidth)


def test_a_rate_is_of_all_values_of_all_matrices_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROWS", (1, 64))
    monkeypatch.setattr(products, "_STACK_BYTES", 16 * 960 * 960 * 4)
    of = products.chains(jax.devices()[0])
    for chain in of:
        chain.run()
    found = products.rates(of, [0.5, 0.25] + [1.0] * (len(of) - 2))
    # 16 matrices for a row; for 64 rows a quarter of them.
    assert found["float32"] == {1: 2 * 16 * 960**2 / 0.5, 64: 2 * 64 * 4 * 960**2 / 0.25}
    assert found["bfloat16"][1] == 2 * 32 * 960**2


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *map(str, arguments)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_what_is_measured_is_kept_for_later_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not Target.of("cpu").hardware.is_measured
    measured = replace(with_products(RATES), step_seconds=0.125)
    monkeypatch.setattr(
        planning, "calibrate", lambda say: (measured, [CalibrationFit("small", 2.0, 3.0), CalibrationFit("large", 2.0, 2.0)])
    )
    assert run("--calibrate") == 0
    told = capsys.readouterr().out
    assert "+50% at worst (small)" in told
    assert str(calibration_path(CPU)) in told
    assert Target.of("cpu").hardware == measured == Hardware.read(calibration_path(CPU))
    halves = Target.of("2xcpu").hardware
    assert halves.product_rates["float32"][32] == 50e9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--calibrate", "--target", "8xh100"), "only this machine's processor can be measured"),
        (("--target", "cpu"), "model is missing: give --model"),
        (("--model", "smollm2-135m"), "target is missing: give --target"),
    ],
)
def test_what_is_missing_or_cannot_be_measured_is_said(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_every_type_that_is_multiplied_here_has_its_size() -> None:
    assert set(products.GROUP) == set(calibration._ITEM_BYTES)
