"""`jaxinfer plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.architecture.known_models import read_shape
from jaxinfer.architecture.model_config import UnsupportedModelError
from jaxinfer.planner.workload import RequestClass, Workload
from server.cli import main
from tests import tiny_model


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(card: str, num_devices: int) -> None:
        raise RuntimeError(f"no compiler for a {card}")

    monkeypatch.setattr("jaxinfer.planner.target_programs.target_devices", nowhere)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *map(str, arguments)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_any_config_json_will_do(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path / "tiny")
    assert read_shape(str(folder)) == read_shape(str(folder / "config.json")) == tiny_model.CONFIG
    (tmp_path / "bad.json").write_text("[1]")
    for name, words in (("bad.json", "must be an object"), ("none.json", "can't be read")):
        with pytest.raises(UnsupportedModelError, match=words):
            read_shape(str(tmp_path / name))


def test_it_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(capsys, "--model", "llama-3.1-8b", "--target", "2xh100", "--decode-parallel", "tp=1,pp=2", "--batch", 8)
    assert (made["fits"], made["compiled"], made["batch"]) == (True, False, 8)
    assert made["prefill_parallel"] == made["decode_parallel"] == {"tp": 1, "pp": 2, "ep": 1}
    keys = {"weights_bytes", "activation_bytes", "kv_bytes", "reserved_bytes"}
    assert len(made["devices"]) == 2
    for device in made["devices"]:
        assert keys < device.keys()
        assert sum(device[key] for key in (*keys, "unused_bytes")) == 84942979072
    assert made["kv_tokens"] > 500_000
    assert made["steps"]["decode"]["micro_batches"] == 2
    assert made["predicted"]["requests_per_second"] > 0


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "llama-3.1-8b", "--target", "2xh100") == 0
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("weights", "tokens fit", "decode step", "most of it", "layouts by predicted throughput", "estimated")
    )


def test_it_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "llama-3.1-70b", "--target", "1xh100", "--prefill-parallel", "tp=1") == 0
    assert (
        "does not fit: 8,192 tokens of context have no room\nwould fit, by arithmetic: more of the same cards: 2xh100"
        in capsys.readouterr().out
    )


def test_a_trace_is_what_its_lines_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"input_length": {n}, "output_length": {n // 10}, "hash_ids": []}}\n' for n in (100, 300, 200)) + "\n")
    workload = Workload.of_trace(trace)
    assert workload.kinds == tuple(RequestClass(n, n // 10, pytest.approx(1 / 3)) for n in (100, 200, 300))
    assert (workload.mean_input, workload.mean_output) == (pytest.approx(200), pytest.approx(20))
    assert workload.decode_context == round((10 * 105 + 20 * 210 + 30 * 315) / 60)
    made = planned(capsys, "--model", "smollm2-135m", "--target", "1xh100", "--trace", trace)
    assert made["predicted"]["output_tokens_per_second"] == pytest.approx(20 * made["predicted"]["requests_per_second"])


def test_azures_traces_are_read_as_replays_read_them(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,300,30\n2023-11-16 18:17:04,100,10\n")
    workload = Workload.of_trace(trace)
    assert workload.kinds == (RequestClass(100, 10, 0.5), RequestClass(300, 30, 0.5))


def test_long_traces_are_made_into_kinds(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"input_length": {n}, "output_length": 7}}\n' for n in range(1, 1001)))
    workload = Workload.of_trace(trace)
    assert len(workload.kinds) == 64
    assert workload.mean_input == pytest.approx(500.5, rel=1e-3)
    assert sum(kind.share for kind in workload.kinds) == pytest.approx(1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch", "0"], "batch is 0: it must be at least 1"),
        (["--context", "0"], "context is 0"),
        (["--context", "1000000"], "context is 1000000: this model's is 8192 tokens"),
        (["--input-length", "0"], "input_length is 0"),
        (["--target", "8xa100"], "known are b200, h100, h200, rtxpro6000"),
        (["--model", "gpt-17"], "no shape of a model"),
        (["--trace", "/nowhere"], "trace is /nowhere: it can't be read"),
        (["--plot", "/nowhere/plan.png"], "plot is /nowhere/plan.png, but there is no folder /nowhere: make it"),
        (["--plot", "plan"], "plot is plan: give a file that ends in .png"),
        (["--decode-parallel", "tp=4"], "both tp=4 take 4 devices, but 2xh100 has 2"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "smollm2-135m", "--target", "2xh100", *flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"input_length": 5}', '{"input_length": 0, "output_length": 5}', '{"input_length": "5", "output_length": 5}']
)
def test_bad_lines_of_traces_are_named(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 5, "output_length": 5}\n' + line)
    assert run("--model", "smollm2-135m", "--target", "1xh100", "--trace", trace) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("server.planning.plan_from_arguments", plan)
    for path in (tmp_path / "missing" / "plan.png", tmp_path / "plan.xyz"):
        assert run("--model", "smollm2-135m", "--target", "1xh100", "--plot", path) == 2


def test_it_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    flags = ["--prefill-parallel", "tp=2", "--decode-parallel", "pp=2"]
    assert run("--model", "llama-3.1-8b", "--target", "4xh100", *flags, "--plot", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
