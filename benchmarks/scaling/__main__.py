"""`python -m benchmarks.scaling`: predicted and measured cost of a model on 1 to 8 devices: tensor parallel, in stages,
and both.

The devices are virtual: parts of one CPU, whose cores they share. So nothing gets faster with more of them: a flat line
is ideal, and what is above it is the cost of the layout itself. For real GPUs there are predictions, labelled as such.
Writes JSON, a page (Markdown) and a plot (PNG).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import BackgroundLoad, machine, machine_slug
from benchmarks.scaling import charts, predictions, report
from benchmarks.scaling.workload import ONE_DEVICE, ScalingWorkload, label, seconds
from benchmarks.worker import ROOT, Answer, Worker, WorkerError
from benchmarks.workload import WorkloadCase
from checkpoints.hub import open_source, resolve
from checkpoints.source import CheckpointError
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from sharding.layout import Parallel

_KV_BYTES, _LEAST_KV_BYTES = 2**28, 2**26  # of all devices together; of one, where that would be less


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = Console(highlight=False)
    try:
        source = open_source(resolve(options.model))
    except CheckpointError as error:
        sys.exit(str(error))
    target = Target.of("cpu")
    shapes = TargetModel(source.config, target, dtype=options.dtype)
    vocab_size = shapes.architecture.vocab_size
    work = (
        ScalingWorkload.quick(options.layouts, vocab_size)
        if options.quick
        else ScalingWorkload.full(options.layouts, options.rounds, vocab_size)
    )
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "settings": {"model": resolve(options.model).stem, "dtype": options.dtype, "rounds": work.rounds, "quick": options.quick},
        "hardware": asdict(target.hardware),
        "cases": [label(case) for case in work.cases],
        "predicted": predictions.predict_this_machine(shapes, work, target.hardware),
        **measure_layouts(work, options, lambda text: console.print(text, markup=False)),
        "elsewhere": predictions.predict_target(),
    }
    output = options.output or ROOT / f"benchmarks/results/{machine_slug(result['machine'])}-{result['date']}-scaling.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    charts.draw(output.with_suffix(".png"), result)
    page = report.render(result, output.with_suffix(".png").name)
    output.with_suffix(".md").write_text(page, encoding="utf-8")
    console.print(page, markup=False)
    console.print(f"written to {output}, its page and its picture beside it")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    flag = parser.add_argument
    flag("--model", default="default", help="as for `jaxinfer serve --model` (default: %(default)s)")
    flag("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of weights (default: %(default)s)")
    flag("--layouts", nargs="+", default=[], metavar="LAYOUT", help="such as tp=1 tp=2,pp=2; all of 1, 2, 4 and 8 devices if not given")
    flag("--rounds", type=int, default=5, help="measurements of each figure in each layout (default: %(default)s)")
    flag("--quick", action="store_true", help="few layouts, one round, a few tokens: a look at whether it runs, not a measurement")
    flag(
        "--output",
        type=Path,
        help="JSON file; the page and the picture lie beside it (default: benchmarks/results/MACHINE-DATE-scaling.json)",
    )
    options = parser.parse_args(arguments)
    try:
        options.layouts = [Parallel.parse(text) for text in options.layouts]
    except ValueError as error:
        parser.error(f"--layouts: {error}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: it must be at least 1")
    return options


def measure_layouts(work: ScalingWorkload, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """By layout and case. Each layout is an engine in a process of its own whose runs are interleaved with one
    device's, so that a ratio is of two measurements of one round; and the machine's background load. A round of few
    tokens comes first, to warm up. Two engines run at a time: all would not fit."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    about: dict[str, dict[str, Any]] = {}
    others = BackgroundLoad()
    with ExitStack() as stack:
        say(f"starting {ONE_DEVICE}")
        one = stack.enter_context(closing(_worker(work, ONE_DEVICE, options)))
        about[str(ONE_DEVICE)] = one.about
        for layout in [layout for layout in work.layouts if layout != ONE_DEVICE] or [ONE_DEVICE]:
            pair = {str(ONE_DEVICE): one}
            with ExitStack() as of_layout:
                if layout != ONE_DEVICE:
                    say(f"starting {layout}")
                    pair[str(layout)] = of_layout.enter_context(closing(_worker(work, layout, options)))
                    about[str(layout)] = pair[str(layout)].about
                for number in range(work.rounds + 1):
                    for case in work.cases:
                        say(f"{f'round {number} of {work.rounds}' if number else 'warming up'}: {label(case)}, {layout}")
                        others.look()
                        asked = (case if number else case.short()).as_json()
                        answers = {name: worker.ask(case=asked, seed=number) for name, worker in pair.items()}
                        if number:
                            others.keep()
                            _record(found, case, answers)
    busy = others.samples
    return {
        "measured": found,
        "layouts": about,
        "others": {"median": statistics.median(busy), "most": max(busy), "samples": busy} if busy else None,
    }


def _record(found: dict[str, dict[str, dict[str, list[float]]]], case: WorkloadCase, answers: Mapping[str, Answer]) -> None:
    """Records one round."""
    of_one = seconds(case, answers[str(ONE_DEVICE)]["tokens_per_second"])
    for name, answer in answers.items():
        of_case = found.setdefault(name, {}).setdefault(label(case), {"seconds": [], "ratio": [], "bubble_share": [], "host_seconds": []})
        taken = seconds(case, answer["tokens_per_second"])
        told = {"seconds": taken, "ratio": taken / of_one, **{key: answer[key] for key in ("bubble_share", "host_seconds")}}
        for key, value in told.items():
            of_case[key] += [] if value is None else [value]


def _worker(work: ScalingWorkload, layout: Parallel, options: argparse.Namespace) -> Worker:
    """Raises `WorkerError`."""
    prompt_tokens = work.prompt.size
    settings = {
        "model": str(resolve(options.model)),
        "dtype": options.dtype,
        "prefill_parallel": str(layout),
        "cpu_devices": layout.num_devices,
        "kv_memory": f"{max(_KV_BYTES // layout.num_devices, _LEAST_KV_BYTES)}B",
        "max_model_len": work.context,
        "max_batch_size": work.throughput.size,
        "decode_buckets": (1, work.throughput.size),
        "prefill_chunk_size": prompt_tokens,
        "prefill_buckets": (prompt_tokens,),
    }
    try:
        return Worker(sys.executable, "benchmarks.scaling.layout_worker", json.dumps(settings))
    except WorkerError as error:
        sys.exit(f"{layout}: {error}")


if __name__ == "__main__":
    main()
