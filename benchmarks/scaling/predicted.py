"""What `sharding.cost_model` says of the same work: of this machine's virtual devices, and of cards that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.scaling.work import ONE_DEVICE, Work, all_layouts, label
from benchmarks.workload import Case
from jaxinfer.config import ConfigError
from jaxinfer.dry_run.predict import Steps, decode_steps, prefill_steps
from jaxinfer.dry_run.shapes import RoleShape, Shapes
from jaxinfer.dry_run.target import Target
from jaxinfer.models.shapes import read_shape
from sharding.hardware import Hardware
from sharding.layout import Parallel
from sharding.pipeline import round_seconds, steady_bubble_share, timeline

ELSEWHERE = "llama-3.1-70b", "8xh100"


@dataclass(frozen=True)
class Prediction:
    seconds: float
    bubble_share: float
    bound: str  # what the slowest stage spends most on


def predict(shapes: Shapes, layout: Parallel, case: Case, hardware: Hardware) -> Prediction:
    """Where devices are parts of one machine, what one stage leaves of it another takes: it has all micro-batches' work in all stages to do, whoever
    waits for whom."""
    role = "decode" if case.kind == "decode" else "prefill"
    shape = shapes.layout(role, layout, is_shared=True)
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


def _steps(shape: RoleShape, case: Case, hardware: Hardware) -> Steps:
    if case.kind == "decode":
        return decode_steps(shape, case.size, case.prompt_tokens + case.new_tokens // 2, hardware)
    num_tokens = case.size if case.kind == "prefill" else case.prompt_tokens
    return prefill_steps(shape, 1, num_tokens, num_tokens, hardware)


def of_this_machine(shapes: Shapes, work: Work, hardware: Hardware) -> dict[str, dict[str, dict[str, Any]]]:
    """By layout and case."""
    return {
        str(layout): {label(case): asdict(predict(shapes, layout, case, hardware)) for case in work.cases}
        for layout in {ONE_DEVICE: None, **dict.fromkeys(work.layouts)}
    }


def elsewhere(model: str = ELSEWHERE[0], target_name: str = ELSEWHERE[1]) -> dict[str, Any]:
    """Of a large model on cards joined by NVLink, and by PCIe: layouts of as many of them as hold its weights."""
    target = Target.of(target_name)
    shapes = Shapes(read_shape(model), target)
    card = target.hardware
    links = {"NVLink": card, "PCIe": replace(card, link_bandwidth=card.host_bandwidth)}
    cases = (Case("decode", 1, 256, 1024), Case("decode", 256, 256, 1024), Case("prefill", 2048), Case("throughput", 64, 1, 2048))
    return {
        "model": model,
        "target": target_name,
        "cases": [label(case) for case in cases],
        "links": {name: _layouts(shapes, target, cases, hardware) for name, hardware in links.items()},
    }


def _layouts(shapes: Shapes, target: Target, cases: Sequence[Case], hardware: Hardware) -> Mapping[str, dict[str, dict[str, Any]]]:
    """By layout and case, where there is room for weights and for all sequences' pages."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for layout in all_layouts():
        try:
            shape = shapes.layout("decode", layout, is_shared=True)
        except ConfigError:
            continue
        fitting = [case for case in cases if layout.num_devices <= target.num_devices and _fits(shapes, shape, target, case)]
        if fitting:
            found[str(layout)] = {label(case): asdict(predict(shapes, layout, case, hardware)) for case in fitting}
    return found


def _fits(shapes: Shapes, shape: RoleShape, target: Target, case: Case) -> bool:
    num_pages = (case.size if case.kind == "decode" else shape.layout.pp) * shapes.spec.max_pages(case.context, case.context)
    room = target.memory_bytes - target.reserved_bytes
    return all(stage.weight_bytes + num_pages * stage.page_bytes < room for stage in shape.stages)
