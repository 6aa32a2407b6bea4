"""Shares of what was measured of the card, JSON that survives a kill, a table that says what is missing, tilings that are kept."""

import json
import os

import pytest

from benchmarks.gpu import report as report_module
from benchmarks.gpu import tune
from benchmarks.gpu.measure import CallTimes, GpuMeasure, RowResult
from benchmarks.gpu.report import Report
from benchmarks.gpu.roofline import RooflineWork
from benchmarks.gpu.worker import Row


def row(name, way, case="", seconds=None, work=None, failure=None, **notes):
    times = None if seconds is None else CallTimes(seconds, seconds * 0.9, seconds * 1.2)
    return Row(GpuMeasure(name, way, case, None, 1.0), RowResult(case, times, work, notes, failure))


def report(*rows):
    made = Report({"seed": 1})
    made.add({"card": "NVIDIA H200"})
    for each in rows:
        made.add(each)
    return made


CARD = (
    row("copy", "loop", seconds=1e-3, work=RooflineWork(3e9, 0)),
    row("copy", "launches", seconds=1e-3, work=RooflineWork(4e9, 0)),
    row("matmul", "xla", seconds=1e-3, work=RooflineWork(1e6, 8e11)),
)


def test_shares_are_of_the_best_that_was_measured_of_the_card():
    made = report(
        *CARD, row("decode", "ours", "a", 2e-3, RooflineWork(4e9, 1e9)), row("prefill", "ours", "b", 4e-3, RooflineWork(1e6, 8e11))
    )
    written = made.as_json()
    assert written["ceilings"] == {"bytes_per_s": pytest.approx(4e12), "flops_per_s": pytest.approx(8e14)}
    decode, prefill = written["rows"][-2:]
    assert (decode["share"], decode["bound"]) == (pytest.approx(0.5), "copy")
    assert (prefill["share"], prefill["bound"]) == (pytest.approx(0.25), "matmul")
    table = made.table()
    assert "2,000 GB/s     50% of copy" in table and "200.0 TFLOP/s  25% of matmul" in table
    assert "0.90-1.20" in table


def test_without_ceilings_there_are_times_and_no_shares():
    made = report(CARD[0], row("decode", "ours", "a", 2e-3, RooflineWork(4e9, 1e9)))
    assert made.rates() is None and "share" not in made.as_json()["rows"][-1]
    assert "2.00 ms" in made.table() and "%" not in made.table()
    assert str(made.rows[-1]) == "decode/ours/a: 2.00 ms"


def test_a_cpu_has_gflops():
    assert (
        "3.0 GFLOP/s"
        in report(row("decode", "ours", "a", 1e-3, RooflineWork(1.0, 3e6)), row("matmul", "xla", "b", 1e-3, RooflineWork(1.0, 3e6))).table()
    )


def test_what_has_no_result_is_told_once_for_each_reason():
    missing = [row("decode", "ours", f"size {i}", failure="no such kernel") for i in range(4)]
    table = report(
        *CARD, *missing, row("decode", "theirs", "a", failure="absent: torch"), row("step", "theirs", "", failure="absent: torch")
    ).table()
    after = table.partition("without a result:")[2]
    assert "decode / ours (4 sizes): no such kernel" in after and "decode / theirs (a): absent: torch" in after
    assert "step / theirs: absent: torch" in after
    assert len(after.strip().splitlines()) == 3
    assert "without a result" not in report(*CARD).table()


def test_a_models_tokens_are_compared_with_the_first_ways():
    made = report(
        row("step", "a", "x", 1.0, tokens=[1, 2, 3]), row("step", "b", "x", 1.0, tokens=[1, 9, 3]), row("step", "b", "y", 1.0, tokens=[4])
    )
    lines = made.table().splitlines()
    assert "tokens" not in lines[1] and lines[2].endswith("2 of 3 tokens as a's") and "tokens" not in lines[3]


def test_a_kill_while_writing_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "result.json"
    made = report(CARD[0])
    made.write(path)
    assert len(json.loads(path.read_text())["rows"]) == 1
    made.add(CARD[1])

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        made.write(path)
    assert len(json.loads(path.read_text())["rows"]) == 1


def test_the_card_names_the_file():
    assert report().card == "nvidia-h200" and Report({}).card == "unknown-card"


@pytest.mark.parametrize(("value", "text"), [(2.5e-6, "2.5 us"), (1.5e-3, "1.50 ms"), (2.0, "2.00 s")])
def test_seconds_are_short(value, text):
    assert report_module.seconds(value) == text


def tiling_row(case, tokens, seconds, name="paged_attention", failure=None):
    return row(name, "mosaic_gpu", case, seconds, failure=failure, tiling={"tokens": tokens}, shape={"batch": case})


def test_the_quickest_tiling_that_was_right_is_kept(tmp_path):
    made = report(
        tiling_row("1", 64, 3e-6),
        tiling_row("1", 128, 2e-6),
        tiling_row("1", 256, None, failure="relative error 1"),
        tiling_row("8", 64, 5e-6),
    )
    assert tune.write(made, tmp_path) == f"2 tilings into {tmp_path / 'nvidia-h200.json'}"
    kept = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert kept["card"] == "NVIDIA H200"
    entry = {"kernel": "paged_attention", "shape": {"batch": "1"}, "tiling": {"tokens": 128}, "microseconds": 2.0, "tried": 2}
    assert kept["entries"][0] == entry and len(kept["entries"]) == 2


def test_a_later_tuning_replaces_its_own_shapes_alone(tmp_path):
    tune.write(report(tiling_row("1", 64, 3e-6), tiling_row("8", 64, 5e-6), tiling_row("1", 64, 7e-6, name="other")), tmp_path)
    tune.write(report(tiling_row("1", 128, 4e-6)), tmp_path)
    entries = json.loads((tmp_path / "nvidia-h200.json").read_text())["entries"]
    found = {(entry["kernel"], entry["shape"]["batch"]): entry["microseconds"] for entry in entries}
    assert found == {("paged_attention", "8"): 5.0, ("other", "1"): 7.0, ("paged_attention", "1"): 4.0}
    assert tune.write(report(), tmp_path) == "no tiling was measured"
