"""`python -m benchmarks.scaling`: what it measures, what it predicts, and that it runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import predictions
from benchmarks.scaling.__main__ import main, parse_arguments
from benchmarks.scaling.charts import best_of
from benchmarks.scaling.predictions import predict
from benchmarks.scaling.workload import KINDS, ScalingWorkload, all_layouts, kind, label, seconds
from benchmarks.workload import WorkloadCase
from jaxinfer.architecture.known_models import read_shape
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from sharding.hardware import HARDWARE
from sharding.layout import Parallel

ONE, MANY, PROMPTS = WorkloadCase("decode", 1, 48), WorkloadCase("decode", 32, 24), WorkloadCase("throughput", 16, 1, 512)


def test_every_layout_of_up_to_eight_devices_is_measured() -> None:
    counts = Counter(layout.num_devices for layout in all_layouts())
    assert counts == {1: 1, 2: 2, 4: 3, 8: 4}
    assert [kind(Parallel.parse(text)) for text in ("tp=1", "tp=8", "pp=2", "tp=2,pp=2")] == [KINDS[0], KINDS[0], KINDS[1], KINDS[2]]


def test_seconds_are_of_a_step_or_of_a_prompt() -> None:
    assert seconds(MANY, 64.0) == 0.5  # 32 tokens a step
    assert seconds(WorkloadCase("prefill", 512), 1024.0) == 0.5
    assert seconds(PROMPTS, 2.0) == 0.5  # a token of each prompt
    assert len({label(case) for case in ScalingWorkload.full((), 1, 50_000).cases}) == 4


def test_prompts_are_of_the_models_own_tokens() -> None:
    assert {case.token_ids for case in ScalingWorkload.quick((), 512).cases} == {(0, 512)}
    assert all(case.token_ids[1] <= 31_000 for case in ScalingWorkload.full((), 1, 50_000).cases)


@pytest.fixture(scope="module")
def smollm2() -> TargetModel:
    return TargetModel(read_shape("smollm2-135m"), Target.of("cpu"))


def test_virtual_devices_gain_nothing_by_being_more(smollm2: TargetModel) -> None:
    cpu = replace(HARDWARE["cpu"], link_seconds=0.0, link_bandwidth=1e18, step_seconds=0.0, kernel_seconds=0.0, overlaps=False)
    one, two = (predict(smollm2, Parallel(pp=pp), ONE, cpu) for pp in (1, 2))
    assert two.seconds == pytest.approx(one.seconds, rel=0.01)  # stages work one after the other, with the machine to themselves
    assert (one.bubble_share, two.bubble_share) == (0, pytest.approx(0.5, abs=0.05))
    half = predict(smollm2, Parallel(), replace(MANY, size=16), cpu).seconds
    assert predict(smollm2, Parallel(pp=2), MANY, cpu).seconds == pytest.approx(2 * half, rel=0.05)  # weights are read for each half
    assert predict(smollm2, Parallel(3), MANY, cpu).seconds == pytest.approx(predict(smollm2, Parallel(), MANY, cpu).seconds, rel=0.05)


def test_cards_are_told_apart_as_they_should_be_chosen() -> None:
    far = predictions.predict_target("llama-3.1-70b", "8xh100")
    one, many, prompt, prompts = far["cases"]
    nvlink, pcie = far["links"]["NVLink"], far["links"]["PCIe"]
    assert "tp=1" not in nvlink  # its weights do not fit on one
    assert many not in nvlink["tp=2"]  # nor all sequences' pages beside them on two
    eight = [text for text in nvlink if Parallel.parse(text).num_devices == 8]
    assert min(eight, key=lambda text: nvlink[text][one]["seconds"]) == "tp=8"
    assert min(eight, key=lambda text: nvlink[text][prompt]["seconds"]) == "tp=8"
    assert nvlink["tp=1,pp=8"][one]["bubble_share"] == pytest.approx(7 / 8, abs=0.02)
    assert pcie["tp=1,pp=8"][prompts]["seconds"] < pcie["tp=8"][prompts]["seconds"]
    assert pcie["tp=8"][prompts]["seconds"] > 2 * nvlink["tp=8"][prompts]["seconds"]


def test_a_line_has_the_quickest_of_its_kind() -> None:
    found = {"tp=1": 8.0, "tp=2": 5.0, "tp=1,pp=2": 6.0, "tp=2,pp=4": 3.0, "tp=4,pp=2": 2.0}
    lines = {name: best_of(name, list(found), found.get) for name in KINDS}
    assert lines == {KINDS[0]: [(1, 8.0), (2, 5.0)], KINDS[1]: [(1, 8.0), (2, 6.0)], KINDS[2]: [(1, 8.0), (8, 2.0)]}


def test_a_layout_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--layouts", "tp=zwei"])
    assert "'tp=zwei' is no part of a layout" in capsys.readouterr().err


@pytest.mark.exhaustive  # a minute of several engines; its parts have tests
def test_a_look_runs_to_its_end(tiny_model_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "of" / "look.json"
    main(["--quick", "--model", str(tiny_model_path), "--layouts", "tp=1", "tp=1,pp=2", "--output", str(output)])
    result = json.loads(output.read_text())
    assert list(result["measured"]) == list(result["predicted"]) == ["tp=1", "tp=1,pp=2"]
    for layout, cases in result["measured"].items():
        assert list(cases) == result["cases"]
        for of_label, of_case in cases.items():
            assert [0 < value < 60 for value in of_case["seconds"]] == [True]
            assert of_case["ratio"] == (
                [1.0] if layout == "tp=1" else [of_case["seconds"][0] / result["measured"]["tp=1"][of_label]["seconds"][0]]
            )
            assert bool(of_case["bubble_share"]) == ("pp" in layout)
    # A sequence alone keeps one of two stages busy at a time.
    assert 0.2 < result["measured"]["tp=1,pp=2"][result["cases"][0]]["bubble_share"][0] < 0.8
    page = output.with_suffix(".md").read_text()
    assert "whether it runs, not a measurement" in page
    assert "Predicted, not measured: llama-3.1-70b on 8xh100" in page
    assert output.with_suffix(".png").stat().st_size > 50_000
