"""`python -m benchmarks.versions OTHER`: this version beside the one in the folder OTHER, a checkout of the project.

Both are processes with the same packages, asked one after the other. A figure is a median, a ratio that of two
measurements of one round. Host time is the processor time of the engine's thread for a decode step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BATCHES = (1, 8, 32)
FIGURES = (
    *[f"decode, batch {batch}: ms a step" for batch in BATCHES],
    *[f"host, batch {batch}: us a step" for batch in BATCHES],
    "prefill of 512 tokens: ms",
)
STARTS = ("start, cold: s", "start, warm: s")

# Reads a line of JSON for each question. It uses only what both versions have.
_WORKER = """
import json, os, random, sys, time
began = float(os.environ["BEGAN"])
from jaxinfer import LLM, SamplingParams
settings = dict(kv_memory="256MiB", max_model_len=1024, max_batch_size=32, decode_buckets=(1, 8, 32), prefill_buckets=(16, 512),
    prefill_chunk_size=512, prefix_cache=False) | json.loads(sys.argv[1])
llm = LLM("default", **settings)
engine, stats = llm.engine, llm.engine.stats
print(json.dumps(time.time() - began), flush=True)
def decode(batch, tokens):
    for number in range(batch):
        prompt = [random.randrange(1000, 31000) for _ in range(16)]
        engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=tokens + 8, ignore_eos=True))
    begun = set()
    while len(begun) < batch:
        begun.update(delta.request_id for delta in engine.step() if delta.token_ids)
    began, steps, host, ended = time.perf_counter(), stats.num_decode_steps, stats.host_seconds, False
    while not ended:
        ended = any(delta.finish_reason is not None for delta in engine.step())
    steps = stats.num_decode_steps - steps
    seconds, host = time.perf_counter() - began, stats.host_seconds - host
    while engine.has_work:
        engine.step()
    return 1e3 * seconds / steps, 1e6 * host / steps
def prefill(length):
    prompt = [random.randrange(1000, 31000) for _ in range(length)]
    began = time.perf_counter()
    engine.add_request("prompt", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while engine.has_requests:
        engine.step()
    return 1e3 * (time.perf_counter() - began)
for line in sys.stdin:
    kind, *numbers = json.loads(line)
    print(json.dumps(decode(*numbers) if kind == "decode" else prefill(*numbers)), flush=True)
"""


class Version:
    """A process of a version. It is stopped but while it is asked."""

    def __init__(self, tree: Path, settings: dict[str, Any], cache: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(tree), "BEGAN": str(time.time()), "JAX_COMPILATION_CACHE_DIR": str(cache)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, json.dumps(settings)],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start_seconds = float(self._read())
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read())
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a version ended without an answer: see above")
        return line


def measure(versions: Sequence[Version], rounds: int, tokens: int) -> dict[str, list[list[float]]]:
    """Of each figure, each round's values, in the versions' order."""
    found: dict[str, list[list[float]]] = {figure: [] for figure in FIGURES}
    for number in range(-1, rounds):  # the first round warms up
        order = [0, 1] if number % 2 else [1, 0]
        values: dict[str, list[float]] = {figure: [0.0, 0.0] for figure in FIGURES}
        for batch in BATCHES:
            for which in order:
                step, host = versions[which].ask("decode", batch, tokens)
                values[f"decode, batch {batch}: ms a step"][which], values[f"host, batch {batch}: us a step"][which] = step, host
        for which in order:
            values[FIGURES[-1]][which] = statistics.median(versions[which].ask("prefill", 512) for _ in range(3))
        if number >= 0:
            for figure, pair in values.items():
                found[figure].append(pair)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=3, help="cold starts of each, and twice as many warm ones (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps of a measurement (default: %(default)s)")
    parser.add_argument("--settings", type=json.loads, default={"dtype": "float32"}, help="of both, as JSON (default: %(default)s)")
    parser.add_argument("--only-this", type=json.loads, default={"weights": "dequantised"}, help="settings of this version alone")
    options = parser.parse_args(arguments)
    trees = [options.other.resolve(), Path(__file__).resolve().parents[1]]
    settings = [options.settings, options.settings | options.only_this]
    found: dict[str, list[list[float]]] = {name: [] for name in STARTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.starts):
            for name, count in zip(STARTS, (1, 2), strict=True):
                for _ in range(count):
                    values = [0.0, 0.0]
                    for which in [0, 1] if number % 2 else [1, 0]:
                        version = Version(trees[which], settings[which], Path(folder, f"{number}-{which}"))
                        values[which] = version.start_seconds
                        version.end()
                    found[name].append(values)
        versions = [Version(tree, each, Path(folder, str(which))) for which, (tree, each) in enumerate(zip(trees, settings, strict=True))]
        found |= measure(versions, options.rounds, options.tokens)
        for version in versions:
            version.end()
    table = Table("", "other", "this", "this / other", "lowest to highest")
    for figure, pairs in found.items():
        if pairs:
            ratios = sorted(new / old for old, new in pairs)
            medians = [f"{statistics.median(values):,.1f}" for values in zip(*pairs, strict=True)]
            table.add_row(figure, *medians, f"{statistics.median(ratios):.3f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
