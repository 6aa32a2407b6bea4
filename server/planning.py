"""`jaxinfer plan`: what a known model needs on target GPUs, in which layout, and how fast it would be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxinfer.architecture.known_models import read_shape
from jaxinfer.config import ConfigError, ScheduleConfig
from jaxinfer.engine.builder import split_cpu
from jaxinfer.planner.calibration import MOST_DEVICES, calibrate
from jaxinfer.planner.report import as_json, describe, ranking
from jaxinfer.planner.search import PlanSettings
from jaxinfer.planner.target import CPU, Target, calibration_path
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.target_plan import TargetPlan, named_layouts, plan_target
from jaxinfer.planner.workload import Workload
from jaxinfer.programs.compilation import use_persistent_cache

_EXAMPLES = {"model": "llama-3.1-8b", "target": "8xh100"}
_CONTEXT = 8192  # tokens, by default


def plan_from_arguments(arguments: argparse.Namespace) -> TargetPlan:
    """Raises `ConfigError` and `UnsupportedModelError`."""
    for name in ("context", "batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1")
    if arguments.compile < 0:
        raise ConfigError(f"compile is {arguments.compile}: it must be at least 0")
    for name, example in _EXAMPLES.items():
        if getattr(arguments, name) is None:
            raise ConfigError(f"{name} is missing: give --{name}, such as {example}")
    target = Target.of(arguments.target)
    if target.is_cpu:
        split_cpu(target.num_devices)
    layouts = named_layouts(target, arguments.prefill_parallel, arguments.decode_parallel)
    workload = _workload(arguments)
    shapes = TargetModel(read_shape(arguments.model), target, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype, weights=arguments.weights)
    most = shapes.architecture.max_position_embeddings
    if arguments.context is not None and arguments.context > most:
        raise ConfigError(f"context is {arguments.context}: this model's is {most} tokens; give that or less")
    context = min(_CONTEXT, most) if arguments.context is None else arguments.context
    setting = PlanSettings(context, workload, arguments.batch)
    if target.is_cpu:  # as an engine would be started here
        engine = ScheduleConfig()
        setting = PlanSettings(context, workload, arguments.batch or engine.max_batch_size, engine.prefill_chunk_size)
    return plan_target(shapes, setting, layouts, num_compiled=arguments.compile)


def calibrate_cpu(target_name: str | None, say: Callable[[str], None]) -> str:
    """Measures this machine's processor and stores the result for later plans. Returns where, and how well predictions
    fit the measurements. Raises `ConfigError`."""
    target = Target.of(target_name or CPU)
    if not target.is_cpu:
        raise ConfigError(
            f"calibrate is given, but target is {target}: only this machine's processor can be measured; give {CPU}, or leave it out"
        )
    split_cpu(max(target.num_devices, MOST_DEVICES))
    use_persistent_cache()
    hardware, fitted = calibrate(say)
    path = calibration_path(CPU)
    hardware.write(path)
    worst, errors = max(fitted, key=lambda one: abs(one.error)), sorted(abs(one.error) for one in fitted)
    return (
        f"{len(fitted)} steps of small models: predicted times are {errors[len(errors) // 2]:.0%} off in the median, {worst.error:+.0%} at worst "
        f"({worst.name}). Kept in {path}"
    )


def show(plan: TargetPlan, *, is_json: bool) -> None:
    """Prints it to standard output."""
    if is_json:
        print(json.dumps(as_json(plan), indent=1))
        return
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in describe(plan):
        table.add_row(f"[bold]{name}", escape(value))
    console.print(table)
    if rows := ranking(plan):
        ranked = Table(box=None, padding=(0, 1, 0, 0), title="layouts by predicted throughput", title_justify="left")
        for name in rows[0]:
            ranked.add_column(name, no_wrap=True, justify="left" if name == rows[0][0] else "right")
        for row in rows[1:]:
            ranked.add_row(*map(escape, row))
        console.print()
        console.print(ranked)
    if not plan.fits:
        print(f"does not fit: {plan.setting.context:,} tokens of context have no room")
        for change in plan.changes:
            print(f"would fit, by arithmetic: {change}")


def _workload(arguments: argparse.Namespace) -> Workload:
    if arguments.trace is not None:
        return Workload.of_trace(arguments.trace)
    return Workload.of_means(arguments.input_length, arguments.output_length)
