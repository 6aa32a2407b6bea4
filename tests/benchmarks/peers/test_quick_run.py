"""The whole of it, small: on the tiny model with this engine alone; with every engine that is there under `make test-parity`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.engines import ENGINES
from benchmarks.worker import ROOT


def quick_run(output: Path, *flags: str, module: str = "benchmarks.peers") -> dict[str, Any]:
    command = [sys.executable, "-m", module, "--quick", "--output", str(output), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


def labels(result: dict[str, Any], part: str, engine: str) -> list[str]:
    """What of a part was measured of an engine, each once and over 0."""
    found = [m for m in result["measures"] if m["part"] == part and engine in m["values"]]
    assert all(len(m["values"][engine]) == 1 and m["values"][engine][0] >= 0 for m in found)
    return [m["label"] for m in found]


@pytest.mark.exhaustive  # half a minute; each part has tests of its own
def test_a_quick_run_of_this_engine_measures_and_reports(tmp_path: Path, tiny_model_path: Path) -> None:
    flags = ("--model", str(tiny_model_path), "--token-ids", "0", "500", "--engines", "jaxinfer-float32", "llama.cpp-q4_1")
    result = quick_run(tmp_path / "run.json", *flags, "--parts", "rates", "second-turn", "quality", "served")
    assert list(result["engines"]) == ["jaxinfer float32"]
    assert "llama.cpp Q4_1" in result["absent"] and not result["lost"]
    ours = "jaxinfer float32"
    assert labels(result, "decode", ours) == ["decode, batch 1", "decode, batch 8"]
    assert labels(result, "prefill", ours) == ["prefill, 64 tokens"]
    assert labels(result, "throughput", ours) == ["16 requests at once, 8 tokens in, 8 out"]
    assert len(labels(result, "host", ours)) == 4 and len(labels(result, "served", ours)) == 8
    assert labels(result, "memory", ours) == ["peak memory, without a server", "peak memory, as a server"]
    assert labels(result, "second turn", "with the prefix cache") == labels(result, "second turn", "without it") != []
    perplexity, divergence, agreement = (m["values"][ours][0] for m in result["measures"] if m["part"] == "quality")
    assert perplexity > 1 and divergence == 0 and agreement == 1
    page = (tmp_path / "run.md").read_text()
    assert "**llama.cpp Q4_1**" in page and all(
        (tmp_path / name).is_file() for name in ("run-rates.png", "run-served.png", "run-start.png")
    )


@pytest.mark.exhaustive
def test_the_short_way_measures_rates_alone(tmp_path: Path, tiny_model_path: Path) -> None:
    flags = ("--model", str(tiny_model_path), "--token-ids", "0", "500", "--engines", "jaxinfer-float32")
    result = quick_run(tmp_path / "run.json", *flags, module="benchmarks.offline")
    assert {m["part"] for m in result["measures"]} == {"decode", "prefill", "throughput", "host", "memory"}


@pytest.mark.parity
@pytest.mark.exhaustive  # two minutes
def test_a_quick_run_of_every_engine_that_is_there(tmp_path: Path, tiny_model_path: Path) -> None:
    # Starts alone would take minutes; and two of torch's threads ten times as long, where another process has a core: they spin while they wait.
    flags = ("--model", str(tiny_model_path), "--token-ids", "0", "500", "--threads", "1")
    result = quick_run(tmp_path / "run.json", *flags, "--parts", "rates", "quality", "served")
    assert {*result["engines"], *result["absent"]} == {engine.name for engine in ENGINES}
    assert not result["lost"]
    for name in result["engines"]:
        assert len(labels(result, "decode", name)) == 2 and len(labels(result, "throughput", name)) == 1
    # All read the same weights: they find the text about as likely.
    [perplexities] = [m["values"] for m in result["measures"] if m["label"] == "perplexity"]
    reference = perplexities["jaxinfer float32"][0]
    assert all(value[0] == pytest.approx(reference, rel=0.05) for value in perplexities.values())
