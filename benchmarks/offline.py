"""`python -m benchmarks.offline`: this engine against Hugging Face transformers, same machine, same weights, same prompts, one run.

The engines take turns, round by round and in changing order; a ratio is of two measurements of one round, so what else the
machine did in that minute touches both. Only ratios travel from one machine to another; absolute rates are printed beside them."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from benchmarks.worker import ROOT, Answer, Worker, WorkerError
from benchmarks.workload import Case, cases
from checkpoints.hub import resolve

OURS = "jaxinfer"  # how the names of our engines begin
PEER_PYTHON = ROOT / ".venv-parity/bin/python"
DTYPES = ("float32", "bfloat16")  # on a CPU this engine's default is the first, on a GPU the second
Answers = dict[str, dict[str, list[Answer]]]  # engine -> case -> one answer a round


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs: the median of the rounds, the lowest and the highest."""

    ours: str
    peer: str
    median: float
    low: float
    high: float


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="default", help="as for `jaxinfer serve --model`: a .gguf file or a folder both engines read")
    parser.add_argument(
        "--peer-python", type=Path, default=PEER_PYTHON, help="Python with torch and transformers (`make test-parity` makes one)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch's threads; all cores if not given")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each case by each engine")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 2048], help="prompt lengths in tokens")
    parser.add_argument("--new-tokens", type=int, default=64, help="timed tokens of each sequence of a decode case")
    parser.add_argument("--quick", action="store_true", help="two rounds of 16 tokens, no long prompts: a look, not a measurement")
    parser.add_argument("--output", type=Path, help="JSON file; benchmarks/results/<cpu or gpu>-<date>.json if not given")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.new_tokens = 2, 16
        options.prefill = [n for n in options.prefill if n <= 512]
    return options


def start_workers(options: argparse.Namespace, console: Console) -> list[Worker]:
    """This engine first, then the peer in each dtype; a peer that isn't there is reported and left out."""
    path = str(resolve(options.model).resolve())
    workers = [Worker(sys.executable, "benchmarks.this_engine", path, dtype) for dtype in DTYPES]
    if not options.peer_python.is_file():
        console.print(f"transformers: absent ({options.peer_python} does not exist); only this engine is measured")
        return workers
    for dtype in DTYPES:
        try:
            workers.append(Worker(str(options.peer_python), "benchmarks.transformers_engine", path, dtype, str(options.threads)))
        except WorkerError as error:
            console.print(f"transformers {dtype}: absent ({str(error).strip().splitlines()[-1]})", markup=False)
    return workers


def run(workers: Sequence[Worker], work: Sequence[Case], rounds: int, console: Console) -> Answers:
    """One unrecorded round to warm up, then the rounds; the order of the engines turns by one each time."""
    answers: Answers = {w.about["name"]: {c.label: [] for c in work} for w in workers}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=len(work) * (rounds + 1) * len(workers))
        for number in range(rounds + 1):
            for case in work:
                for place in range(len(workers)):
                    worker = workers[(number + place) % len(workers)]
                    name = worker.about["name"]
                    progress.update(task, description=f"{f'round {number}' if number else 'warming up'}: {case.label}, {name}")
                    answer = worker.ask(case=case.as_json(), seed=number)
                    if number:
                        answers[name][case.label].append(answer)
                    progress.advance(task)
    return answers


def rates(answers: Answers, engine: str, label: str) -> list[float]:
    return [a["tokens_per_second"] for a in answers[engine][label]]


def ratio(answers: Answers, ours: str, peer: str, label: str) -> Ratio:
    each = [a / b for a, b in zip(rates(answers, ours, label), rates(answers, peer, label), strict=True)]
    return Ratio(ours, peer, statistics.median(each), min(each), max(each))


def summarize(answers: Answers, work: Sequence[Case]) -> list[dict[str, Any]]:
    """A row a case: median rates in tokens/s and, for each of our engines, the ratio to each peer, the fastest peer first."""
    rows = []
    ours = [name for name in answers if name.startswith(OURS)]
    for case in work:
        medians = {name: statistics.median(rates(answers, name, case.label)) for name in answers}
        peers = sorted((n for n in medians if n not in ours), key=lambda n: -medians[n])
        ratios = [vars(ratio(answers, own, peer, case.label)) for own in ours for peer in peers]
        rows.append({"case": case.label, "tokens_per_second": medians, "ratios": ratios})
    return rows


def host_microseconds(answers: Answers, work: Sequence[Case]) -> dict[str, float]:
    """Median time of a decode step spent on the host, outside the device program, by case."""
    ours = [name for name in answers if name.startswith(OURS)]
    found = {
        c.label: [a["host_seconds_per_decode_step"] for name in ours for a in answers[name][c.label]] for c in work if c.kind == "decode"
    }
    return {label: statistics.median(values) * 1e6 for label, values in found.items() if values}


def rate_table(rows: Sequence[dict[str, Any]], engines: Sequence[str]) -> Table:
    out = Table("", *(Column(name.replace(" ", "\n"), justify="right") for name in engines), title="tokens per second, medians")
    for row in rows:
        out.add_row(row["case"], *(f"{row['tokens_per_second'][name]:,.0f}" for name in engines))
    return out


def ratio_table(rows: Sequence[dict[str, Any]], engines: Sequence[str]) -> Table:
    """Each of our engines against the fastest peer of each case."""
    ours = [name for name in engines if name.startswith(OURS)]
    out = Table(
        "", *(Column(name.replace(" ", "\n"), justify="right") for name in ours), title="ratio to the faster transformers: median (range)"
    )
    for row in rows:
        to_best = {r["ours"]: r for r in reversed(row["ratios"])}  # the fastest peer comes first, so last here
        shown = [f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f})" if (r := to_best.get(name)) else "-" for name in ours]
        out.add_row(row["case"], *shown)
    return out


def machine() -> dict[str, Any]:
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cpu": cpu[0] if cpu else platform.processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def main() -> None:
    options = parse_arguments()
    console = Console()
    work = cases(options.decode, options.prefill, options.new_tokens)
    workers: list[Worker] = []
    try:
        workers = start_workers(options, console)
        for worker in workers:
            console.print(f"{worker.about['name']}: ready in {worker.about['ready_seconds']:.1f} s", highlight=False)
        answers = run(workers, work, options.rounds, console)
    finally:
        for worker in workers:
            worker.close()
    rows, host = summarize(answers, work), host_microseconds(answers, work)
    console.print(rate_table(rows, list(answers)))
    if len(workers) > len(DTYPES):
        console.print(ratio_table(rows, list(answers)))
    for label, microseconds in host.items():
        console.print(f"host time outside the device program, {label}: {microseconds:,.0f} us a step", highlight=False)
    kind = "cpu" if workers[0].about["platform"] == "cpu" else "gpu"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    output = options.output or ROOT / "benchmarks/results" / f"{kind}-{date}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "date": date,
        "machine": machine(),
        "engines": [w.about for w in workers],
        "settings": {"model": Path(options.model).name, "rounds": options.rounds, "new_tokens": options.new_tokens},
        "summary": rows,
        "host_microseconds_per_decode_step": host,
        "rounds": answers,
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {output}", highlight=False)


if __name__ == "__main__":
    main()
