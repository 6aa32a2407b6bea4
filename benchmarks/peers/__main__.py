"""`python -m benchmarks.peers`: this engine beside transformers, llama.cpp and vLLM: one machine, one run, the same
weights and prompts.

Runs are interleaved, round by round and in changing order. A ratio is of two measurements of one round, so other load
of the machine in that minute affects both. Writes JSON, a page (Markdown) and plots (PNG).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import BackgroundLoad, machine, machine_slug
from benchmarks.peers import charts, report
from benchmarks.peers.engines import select_engines
from benchmarks.peers.measures import Measures
from benchmarks.peers.peer_set import PeerSet
from benchmarks.peers.plan import PARTS, PeerPlan
from benchmarks.worker import ROOT
from checkpoints.hub import resolve
from checkpoints.source import CheckpointError

RESULTS = ROOT / "benchmarks/results"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    flag = parser.add_argument
    flag("--model", default="default", help="as for `jaxinfer serve --model`: a .gguf file or a folder; llama.cpp reads only the first")
    flag(
        "--engines",
        nargs="+",
        default=[],
        metavar="NAME",
        help="those whose names begin so, such as jaxinfer llama.cpp-q4_1; all if not given",
    )
    flag("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured; all if not given")
    flag("--rounds", type=int, default=3, help="measurements of each figure by each engine (default: %(default)s)")
    flag("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine; all cores if not given")
    flag("--quick", action="store_true", help="one round of everything, a few tokens each: a look at whether it runs, not a measurement")
    flag(
        "--token-ids",
        type=int,
        nargs=2,
        default=None,
        metavar=("FIRST", "END"),
        help="prompts are drawn from these; 1000 to 31000 if not given",
    )
    flag(
        "--install",
        action=argparse.BooleanOptionalAction,
        help="make the peers' environments where they are missing: gigabytes, and a compiler at work for many minutes (default: unless --quick)",
    )
    flag("--output", type=Path, help="JSON file; the page and the pictures lie beside it (default: benchmarks/results/MACHINE-DATE.json)")
    options = parser.parse_args(arguments)
    try:
        options.engines = select_engines(options.engines)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: it must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = Console(highlight=False)
    try:
        model = resolve(options.model).resolve()
    except CheckpointError as error:
        sys.exit(str(error))
    plan = PeerPlan.quick(options.token_ids) if options.quick else PeerPlan.full(options.rounds, options.token_ids)
    about, began = machine(), time.perf_counter()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    company = PeerSet(options.engines, model, options.threads, plan, BackgroundLoad(), lambda text: console.print(text, markup=False))
    installs = not options.quick if options.install is None else options.install
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # child processes must not outlive it
    try:
        company.gather(installs=installs)
        if found := {engine["device"] for engine in company.about.values() if engine["platform"] != "cpu"}:
            about["accelerator"] = " ".join(sorted(found))
        output = options.output or RESULTS / f"{machine_slug(about)}-{date}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            if part not in options.parts:
                continue
            company.measure(part)
            # After each part: results are kept whatever happens later.
            write(output, result_of(company, options, date, about, time.perf_counter() - began))
    finally:
        company.close()
    console.print(output.with_suffix(".md").read_text(encoding="utf-8"), markup=False)
    console.print(f"written to {output}, its page and its pictures beside it")


def result_of(company: PeerSet, options: argparse.Namespace, date: str, about: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The whole run as JSON."""
    busy = company.others.samples
    return {
        "date": date,
        "machine": about,
        "seconds": seconds,
        "settings": {"model": Path(options.model).name, "threads": options.threads, **company.plan.about()},
        "engines": company.about,
        "absent": company.absent,
        "lost": company.lost,
        "others": {"median": statistics.median(busy), "most": max(busy), "samples": busy} if busy else None,
        "measures": company.measures.as_json(),
    }


def write(output: Path, result: dict[str, Any]) -> None:
    """Writes the JSON, the page and the plots."""
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    measures = Measures.from_json(result["measures"])
    where = f"{result['machine']['cpu']}, {result['machine']['cores']} cores, {result['settings']['model']}, {result['date']}"
    pictures = charts.draw(output.parent, output.stem, where, measures, list(result["engines"]))
    output.with_suffix(".md").write_text(report.render(result, [p.name for p in pictures]), encoding="utf-8")


if __name__ == "__main__":
    main()
