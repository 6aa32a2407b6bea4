"""`sharding.cost_model`'s estimates of the same work: for this machine's virtual devices, and for target GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.scaling.workload import ONE_DEVICE, ScalingWorkload, all_layouts, label
from benchmarks.workload import WorkloadCase
from jaxinfer.architecture.known_models import read_shape
from jaxinfer.config import ConfigError
from jaxinfer.planner.cost import StepTimes, decode_steps, prefill_steps
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from sharding.hardware import Hardware
from sharding.layout import Parallel
from sharding.pipeline import round_seconds, steady_bubble_share, timeline

TARGETS = "llama-3.1-70b", "8xh100"


@dataclass(frozen=True)
class Prediction:
    seconds: float
    bubble_share: float
    bound: str  # the largest part of the slowest stage's time


def predict(shapes: TargetModel, layout: Parallel, case: WorkloadCase, hardware: Hardware) -> Prediction:
    """Where devices are parts of one machine, a stage uses what another leaves: the machine has all micro-batches' work
    in all stages to do, whatever waits."""
    role = "decode" if case.kind == "decode" else "prefill"
    placement = shapes.place_shared(layout)
    shape = placement.decode if role == "decode" else placement.prefill
    num_batches = {"decode": min(case.size, layout.pp), "prefill": 1}.get(case.kind, case.size)
    steps = _steps(shape, case, hardware.shared_by(layout.tp))
    moves = {"move_seconds": steps.move_seconds, "return_seconds": steps.return_seconds}
    line = timeline(steps.seconds, num_batches, move_seconds=steps.move_seconds)
    if role == "decode":
        bubbles, of_all = steady_bubble_share(steps.seconds, num_batches, **moves), round_seconds(steps.seconds, num_batches, **moves)
    else:
        bubbles, of_all = line.bubble_share, line.seconds
    if hardware.shares_machine:
        way = sum(steps.seconds) + steps.move_seconds * (layout.pp - 1) + steps.return_seconds
        of_all = num_batches * way
    return Prediction(of_all if role == "decode" else of_all / num_batches, bubbles, steps.bound)


def _steps(shape: RolePlacement, case: WorkloadCase, hardware: Hardware) -> StepTimes:
    if case.kind == "decode":
        return decode_steps(shape, case.size, case.prompt_tokens + case.new_tokens // 2, hardware)
    num_tokens = case.size if case.kind == "prefill" else case.prompt_tokens
    return prefill_steps(shape, 1, num_tokens, num_tokens, hardware)


def predict_this_machine(shapes: TargetModel, work: ScalingWorkload, hardware: Hardware) -> dict[str, dict[str, dict[str, Any]]]:
    """By layout and case."""
    return {
        str(layout): {label(case): asdict(predict(shapes, layout, case, hardware)) for case in work.cases}
        for layout in {ONE_DEVICE: None, **dict.fromkeys(work.layouts)}
    }


def predict_target(model: str = TARGETS[0], target_name: str = TARGETS[1]) -> dict[str, Any]:
    """For a large model on GPUs joined by NVLink, and by PCIe: layouts of as many of them as hold its weights."""
    target = Target.of(target_name)
    shapes = TargetModel(read_shape(model), target)
    card = target.hardware
    links = {"NVLink": card, "PCIe": replace(card, link_bandwidth=card.host_bandwidth)}
    cases = (
        WorkloadCase("decode", 1, 256, 1024),
        WorkloadCase("decode", 256, 256, 1024),
        WorkloadCase("prefill", 2048),
        WorkloadCase("throughput", 64, 1, 2048),
    )
    return {
        "model": model,
        "target": target_name,
        "cases": [label(case) for case in cases],
        "links": {name: _layouts(shapes, target, cases, hardware) for name, hardware in links.items()},
    }


def _layouts(
    shapes: TargetModel, target: Target, cases: Sequence[WorkloadCase], hardware: Hardware
) -> Mapping[str, dict[str, dict[str, Any]]]:
    """By layout and case, where there is room for weights and for all sequences' pages."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for layout in all_layouts():
        try:
            shape = shapes.place_shared(layout).decode
        except ConfigError:
            continue
        fitting = [case for case in cases if layout.num_devices <= target.num_devices and _fits(shape, target, case)]
        if fitting:
            found[str(layout)] = {label(case): asdict(predict(shapes, layout, case, hardware)) for case in fitting}
    return found


def _fits(shape: RolePlacement, target: Target, case: WorkloadCase) -> bool:
    num_pages = (case.size if case.kind == "decode" else shape.layout.pp) * shape.spec.max_pages(case.context, case.context)
    room = target.memory_bytes - target.reserved_bytes
    return all(stage.weight_bytes + num_pages * stage.page_bytes < room for stage in shape.stages)
