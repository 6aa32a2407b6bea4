"""The second opinion: guidellm is given the same requests, and what it says comes under our names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tokenizers

from benchmarks.guidellm_replay import GuidellmError, replay_with_guidellm
from benchmarks.replay_plan import Replay, RequestBuilder
from benchmarks.replay_trace import Prompts, Scale
from jaxinfer.planner.trace import read_trace

TRACE = Path(__file__).parent / "tiny_trace.jsonl"
REPLAY = Replay(RequestBuilder("tiny", True), Prompts(Scale(16, 1 / 32, time=0.5), 1, 500), read_trace(TRACE), 0)

# A stand-in: keeps what it was given and writes a report as guidellm does.
PROGRAM = """#!{python}
import json, pathlib, shutil, sys
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))  # after "run --disable-console"
data, output = json.loads(flags["--data"]), flags["--output"].partition("path=")[2]
if "fail" in json.loads(flags["--backend"])["target"]:
    sys.exit("no such server")
shutil.copytree(pathlib.Path(data["source"]["path"]).parent, "{seen}")
spread = lambda *p: {{"successful": {{"percentiles": dict(zip(("p50", "p90", "p99"), p)), "total_sum": sum(p)}}}}
metrics = {{"request_totals": {{"successful": 17, "errored": 1, "incomplete": 0, "total": 18}},
    "prompt_token_count": spread(300, 100, 0), "output_token_count": spread(30, 10, 0), "request_latency": spread(1, 2, 3),
    "time_to_first_token_ms": spread(100, 200, 300), "inter_token_latency_ms": spread(10, 20, 30)}}
json.dump({{"flags": flags, "benchmarks": [{{"metrics": metrics, "duration": 20.0}}]}}, open(output, "w"))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "guidellm"
    path.write_text(PROGRAM.format(python=sys.executable, seen=tmp_path / "seen"))
    path.chmod(0o755)
    return path


def test_it_replays_the_scaled_trace_and_its_report_is_kept(program, tmp_path, tiny_model_path):
    output = tmp_path / "report.json"
    figures = replay_with_guidellm(program, "http://here", REPLAY, str(tiny_model_path), output, patience=60)
    assert figures["ttft"] == {"p50": 0.1, "p90": 0.2, "p99": pytest.approx(0.3)}
    assert figures["time_per_token"]["p50"] == 0.01
    assert figures["end_to_end"]["p99"] == 3
    assert (figures["requests"], figures["answered"], figures["failed"]) == (18, 17, 1)
    assert figures["prompt_tokens_per_second"] == 20 and figures["output_tokens_per_second"] == 2
    flags = json.loads(output.read_text())["flags"]
    assert json.loads(flags["--data"])["hash_id_block_size"] == 16
    assert json.loads(flags["--backend"])["target"] == "http://here"

    rows = [json.loads(line) for line in (tmp_path / "seen/trace.jsonl").read_text().splitlines()]
    assert [row["hash_ids"] for row in rows] == [list(r.hash_ids) for r in REPLAY.requests]
    assert rows[-1]["timestamp"] == (44_500 - 2_500) / 1e3 * 0.5
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 16) for row in rows)
    assert [row["output_length"] for row in rows] == [round(r.output_length / 32) for r in REPLAY.requests]
    tokenizers.Tokenizer.from_file(str(tmp_path / "seen/tokenizer.json"))


def test_without_it_or_when_it_fails_that_is_told(program, tmp_path, tiny_model_path):
    with pytest.raises(GuidellmError, match="make replay"):
        replay_with_guidellm(tmp_path / "absent", "http://here", REPLAY, str(tiny_model_path), tmp_path / "r.json", 1)
    with pytest.raises(GuidellmError, match="no such server"):
        replay_with_guidellm(program, "http://fail", REPLAY, str(tiny_model_path), tmp_path / "r.json", 60)
