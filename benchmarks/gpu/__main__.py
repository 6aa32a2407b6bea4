"""`python -m benchmarks.gpu`: measures the kernels and the engine on this machine's GPU, in a few minutes and one run.

The most valuable measurements come first. What doesn't fit into --minutes is left out and reported. Results are written
after each row.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import predictions, tune
from benchmarks.gpu.catalog import catalog
from benchmarks.gpu.measure import GpuMeasure
from benchmarks.gpu.process_info import describe_jax, describe_torch
from benchmarks.gpu.report import Report
from benchmarks.gpu.roofline import DATASHEET
from benchmarks.gpu.sizes import FULL
from benchmarks.gpu.worker import Deadline, Row, run_all

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_MARGIN_S = 10.0  # to end a process and write the results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.tune and options.small:
        parser.error("--tune is for the GPU's kernels, in the sizes of real models: it can't be --small")
    if options.order == "given" and not options.only:
        parser.error("--order given is that of --only's patterns: give some")
    if options.predict:
        print(predictions.page(FULL))
        return
    began = time.monotonic()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    # Each process has the GPU to itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    make = partial(catalog, is_small=options.small, seed=seed, is_tuning=options.tune)
    chosen = _select(make(), options.only, options.order)
    if not chosen:
        parser.error(f"--only {' '.join(options.only)} is the name of nothing: there are such as {', '.join(m.key for m in make()[:4])}")
    report = Report(
        {
            "small": options.small,
            "seed": seed,
            "minutes": options.minutes,
            "tune": options.tune,
            "only": options.only,
            "order": options.order,
        }
    )
    report.add({"began": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()})
    abouts: dict[Any, Any] = {
        "jax": partial(describe_jax, needs_gpu=not options.small),
        "torch": partial(describe_torch, needs_gpu=not options.small),
    }
    deadline = Deadline(options.minutes * 60 - _MARGIN_S - (time.monotonic() - began))
    path: Path | None = None
    for said in run_all(make, chosen, abouts, deadline):
        report.add(said)
        path = path or options.output or _unused(_RESULTS / f"{report.card}-{datetime.now(UTC).date().isoformat()}.json")
        if isinstance(said, Row):
            print(said, file=sys.stderr, flush=True)
        report.add({"minutes_taken": round((time.monotonic() - began) / 60, 2)})
        report.write(path)
    if options.tune:
        print(tune.write(report, options.tuned))
    print(report.table())
    print(f"\n{report.about.get('card', 'no card')}: {(time.monotonic() - began) / 60:.1f} minutes; all of it in {path}")


def _select(measures: Sequence[GpuMeasure], patterns: Sequence[str], order: str) -> list[GpuMeasure]:
    """The measures that any pattern names, all where there is none; in the catalog's order or in the patterns'."""
    if order == "given":
        matching = [measure for pattern in patterns for measure in measures if fnmatch(measure.key, pattern)]
        return list({measure.key: measure for measure in matching}.values())
    return [m for m in measures if not patterns or any(fnmatch(m.key, pattern) for pattern in patterns)]


def _unused(path: Path) -> Path:
    """A path that no file has: a second run of a day doesn't overwrite the first."""
    return next(p for n in itertools.count(1) if not (p := path if n == 1 else path.with_stem(f"{path.stem}-{n}")).exists())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="everything ends within these (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: benchmarks/results/<card>-<date>.json)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="measures to run, such as 'copy*' 'paged_attention/mosaic_gpu/*'"
    )
    parser.add_argument(
        "--order", choices=("value", "given"), default="value", help="the most valuable first, or as --only has them (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="of the inputs (default: another in each run)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on a CPU too: does it run?")
    parser.add_argument("--tune", action="store_true", help="try tilings of the kernels instead, and keep the best of each")
    parser.add_argument("--tuned", type=Path, default=tune.FOLDER, help="folder of the tilings kept (default: %(default)s)")
    parser.add_argument(
        "--predict", action="store_true", help=f"print the floors by the datasheets of {', '.join(DATASHEET)}, and measure nothing"
    )
    return parser


if __name__ == "__main__":
    main()
