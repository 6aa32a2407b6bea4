"""A plan as a picture: stages, memory of devices, timelines of decode and prefill. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxinfer.planner.cost import StepTimes
from jaxinfer.planner.memory import RoleMemory
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.target_plan import TargetPlan
from sharding.pipeline import timeline

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_COLOURS = ("#2563eb", "#ea8a1f", "#15946b", "#8b5cf6", "#d64545", "#0e7490", "#a16207", "#be185d")
_PARTS = (("weights", "#2563eb"), ("activations", "#ea8a1f"), ("KV pages", "#15946b"), ("set aside", "#7b8794"), ("unused", "#e4e7eb"))
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _MUTED,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
}
_GIB = 2**30


def draw(plan: TargetPlan, path: Path, model: str) -> None:
    """Write a PNG."""
    chosen = plan.chosen
    rows = [(name, shape, memory, number) for name, shape, memory in plan.roles for number in range(len(shape.stages))]
    heights = [0.5 + 0.42 * len(rows), *(0.5 + 0.42 * shape.layout.pp for shape in (chosen.decode, chosen.prefill))]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 2.6 + sum(heights)), layout="constrained")
        figure.suptitle(f"{model} on {plan.target}: {chosen.layouts}", x=0.01, ha="left", fontsize=15, fontweight="bold", color=_INK)
        memory, decode, prefill = figure.subplots(3, 1, height_ratios=heights)
        _memory(memory, plan, rows)
        title = f"Decode, {chosen.batch} sequences of {plan.setting.workload.decode_context:,} tokens"
        _timeline(decode, plan.decode_steps, title, num_rounds=3, returns=True)
        title = f"Prefill, {plan.setting.chunk_size:,} tokens a step"
        _timeline(prefill, plan.prefill_steps, title, num_rounds=2, returns=False)
        figure.savefig(path, dpi=150)


def _memory(axes: Axes, plan: TargetPlan, rows: list[tuple[str, RolePlacement, RoleMemory, int]]) -> None:
    axes.set_title("Memory of each device")
    left = [0.0] * len(rows)
    labels = []
    for name, shape, _, number in rows:
        layers = shape.stages[number].layers
        first = number * shape.layout.tp + (_first_of_decode(plan) if name == "decode" else 0)
        devices = f"{first}" if shape.layout.tp == 1 else f"{first} to {first + shape.layout.tp - 1}"
        of_role = "" if plan.chosen.layouts.is_shared else f"{name}, "
        labels.append(f"{of_role}device {devices}\nlayers {layers.start} to {layers.stop - 1}")
    for part, colour in _PARTS:
        widths = [_part(part, memory, number) / _GIB for _, _, memory, number in rows]
        axes.barh(range(len(rows)), widths, left=left, color=colour, height=0.62, label=part)
        for row, width in enumerate(widths):
            if width > 0.06 * plan.target.memory_bytes / _GIB:
                ink = _INK if part == "unused" else "white"
                axes.text(left[row] + width / 2, row, f"{width:.1f}", ha="center", va="center", color=ink, fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(plan.target.memory_bytes / _GIB, color=_INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_PARTS), fontsize=9, handlelength=1.2, columnspacing=1.2)
    how = "of compiled programs" if plan.is_compiled else "estimated"
    axes.set_xlabel(f"GiB; {plan.kv_tokens:,} tokens of context fit; activations {how}")


def _part(part: str, memory: RoleMemory, number: int) -> int:
    stage, pages = memory.stages[number], memory.kv_bytes(number)
    return {
        "weights": stage.weight_bytes,
        "activations": stage.activation_bytes,
        "KV pages": pages,
        "set aside": stage.reserved_bytes,
        "unused": stage.room_bytes - pages,
    }[part]


def _timeline(axes: Axes, steps: StepTimes, title: str, *, num_rounds: int, returns: bool) -> None:
    line = timeline(
        steps.seconds,
        steps.num_micro_batches,
        num_rounds,
        move_seconds=steps.move_seconds,
        return_seconds=steps.return_seconds if returns else None,
    )
    waits = (
        ""
        if len(steps.costs) == 1
        else f"; a colour and number a micro-batch; once the pipeline is full stages wait {steps.bubble_share:.0%} of the time"
    )
    axes.set_title(title)
    for work in line.works:
        colour = _COLOURS[work.micro_batch % len(_COLOURS)]
        width = 1e3 * (work.stop - work.start)
        axes.barh(work.stage, width, left=1e3 * work.start, color=colour, edgecolor="white", linewidth=0.6, height=0.7)
        if width > 0.015 * 1e3 * line.seconds:
            axes.text(
                1e3 * work.start + width / 2, work.stage, str(work.micro_batch + 1), ha="center", va="center", color="white", fontsize=8
            )
    axes.set_yticks(range(len(steps.costs)), [f"stage {n + 1}" for n in range(len(steps.costs))], fontsize=9)
    axes.set_ylim(-0.6, len(steps.costs) - 0.4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * line.seconds)
    axes.set_xlabel(f"ms; {1e3 * steps.round_seconds:.3g} a round, most of it {steps.bound}{waits}")


def _first_of_decode(plan: TargetPlan) -> int:
    """Decode's first device."""
    return 0 if plan.chosen.layouts.is_shared else plan.chosen.layouts.prefill.num_devices
