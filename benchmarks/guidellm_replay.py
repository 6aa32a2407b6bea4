"""A second opinion: guidellm replays the same requests against the same server, in a virtual environment of its own.

It creates its own prompts (text, from the same hashes) and its own measurements, without code of this project. Version
0.8 may end before its last request has, and then counts without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.replay_plan import Replay
from benchmarks.worker import ROOT
from checkpoints.hub import open_source, resolve
from jaxinfer.tokenizer import Tokenizer

GUIDELLM = ROOT / ".venv-guidellm/bin/guidellm"
SAMPLE = 10  # requests that its report includes in full
# No network is needed. By default it has ten processes, too many for a small machine.
SETTINGS = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}


class GuidellmError(RuntimeError):
    """guidellm is missing or failed; the message has the end of its output."""


def write_trace(path: Path, replay: Replay) -> None:
    """The replay's requests in the trace's own format, scaled: seconds, tokens, a hash for each block of `block_size`
    tokens."""
    scale, first = replay.prompts.scale, replay.requests[0].timestamp
    rows = (
        {
            "timestamp": (r.timestamp - first) / 1e3 * scale.time,
            "input_length": scale.num_prompt(r),
            "output_length": scale.num_output(r),
            "hash_ids": r.hash_ids,
        }
        for r in replay.requests
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path, model: str) -> None:
    """The model's tokenizer in transformers' format; `model` as for `jaxinfer serve --model`."""
    tokenizer = Tokenizer.from_source(open_source(resolve(model)))
    tokenizer.save(folder / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.token_bytes(tokenizer.eos_token_ids[0]).decode()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def command(program: Path, url: str, replay: Replay, folder: Path, output: Path) -> list[str]:
    backend: dict[str, Any] = {
        "kind": "openai_http",
        "target": url,
        "model": replay.request_builder.model,
        "request_format": "/v1/completions",
    }
    backend["extras"] = {"body": {"temperature": 0}}
    source = {"kind": "json_file", "path": str(folder / "trace.jsonl")}
    data: dict[str, Any] = {"kind": "mooncake", "hash_id_block_size": replay.prompts.scale.block_size, "source": source}
    return [
        *(str(program), "run", "--disable-console"),
        *("--backend", json.dumps(backend)),
        *("--profile", "kind=replay,schedule_turn=timestamp"),
        *("--tokenizer", f"kind=huggingface_auto,model={folder}"),
        *("--data", json.dumps(data)),
        *("--metrics", f"kind=generative,sample_size={SAMPLE}"),
        *("--output", f"kind=json,path={output}"),
    ]


def replay_with_guidellm(program: Path, url: str, replay: Replay, model: str, output: Path, patience: float) -> dict[str, Any]:
    """Runs it, leaves its report at `output`, and returns `figures` of it. Raises `GuidellmError`, and what `resolve`
    raises."""
    if not program.is_file():
        raise GuidellmError(f"{program} does not exist; `make replay` makes it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_trace(folder / "trace.jsonl", replay)
        write_tokenizer(folder, model)
        try:
            done = subprocess.run(
                command(program, url, replay, folder, output),
                env=os.environ | SETTINGS,
                capture_output=True,
                text=True,
                timeout=replay.seconds + patience,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise GuidellmError(f"it did not end within {replay.seconds + patience:.0f} s") from None
    if done.returncode or not output.is_file():
        raise GuidellmError("\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]))
    return figures(json.loads(output.read_text(encoding="utf-8")))


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """The figures of its report that this benchmark has too, under our names, in seconds. Its inter-token latency is
    our `time_per_token`."""
    [benchmark] = report["benchmarks"]
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]

    def seconds(name: str, unit: float) -> dict[str, float]:
        percentiles = metrics[name]["successful"]["percentiles"]
        return {p: percentiles[p] * unit for p in ("p50", "p90", "p99")}

    return {
        "requests": totals["total"],
        "answered": totals["successful"],
        "failed": totals["errored"],
        "seconds": benchmark["duration"],
        "answered_requests_per_second": totals["successful"] / benchmark["duration"],
        "prompt_tokens_per_second": metrics["prompt_token_count"]["successful"]["total_sum"] / benchmark["duration"],
        "output_tokens_per_second": metrics["output_token_count"]["successful"]["total_sum"] / benchmark["duration"],
        "ttft": seconds("time_to_first_token_ms", 1e-3),
        "time_per_token": seconds("inter_token_latency_ms", 1e-3),
        "end_to_end": seconds("request_latency", 1.0),
    }
