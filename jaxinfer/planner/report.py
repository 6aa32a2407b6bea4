"""A plan as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxinfer.config import format_bytes
from jaxinfer.planner.cost import StepTimes
from jaxinfer.planner.memory import RoleMemory
from jaxinfer.planner.search import Candidate
from jaxinfer.planner.target_plan import TargetPlan
from jaxinfer.planner.target_programs import CompiledProgram
from sharding.collectives import Collective
from sharding.layout import Parallel

_RANKED = 8  # layouts in the table


def describe(plan: TargetPlan) -> list[tuple[str, str]]:
    """Rows of a table."""
    chosen, setting = plan.chosen, plan.setting
    total = format_bytes(plan.target.memory_bytes)
    rows = [
        ("target", f"{plan.target}, {total} a device"),
        ("layout", _layout(plan)),
        ("matrices", str(chosen.decode.template.weight_format)),
    ]
    for name, shape, memory in plan.roles:
        devices = f"{shape.layout.tp} device(s)" if len(shape.stages) == 1 else f"{len(shape.stages)} stages of {shape.layout.tp}"
        rows.append((name, f"{devices}, a device:"))
        rows += [
            (f"  stage {n + 1}" if len(shape.stages) > 1 else "", _stage(plan, memory, n, shape.stages[n].layers))
            for n in range(len(shape.stages))
        ]
    rows.append(("set aside", f"{format_bytes(plan.target.reserved_bytes)} a device for the driver and collectives: not measured"))
    lasting = format_bytes(chosen.decode_memory.spec.lasting_token_bytes)
    rows.append(("context", f"{plan.kv_tokens:,} tokens fit; each of a long one costs {lasting}"))
    rows.append(("decode step", f"{_steps(plan.decode_steps)}; {chosen.batch} sequences of {setting.workload.decode_context:,} tokens"))
    rows.append(("prefill step", f"{_steps(plan.prefill_steps)}; {setting.chunk_size:,} tokens"))
    rows += [("collectives", line) for line in _collectives(plan)]
    rows.append(("workload", setting.workload.name))
    rows += [("predicted", line) for line in _predicted(chosen)]
    rows += [("note", note) for note in plan.notes]
    return rows


def ranking(plan: TargetPlan) -> list[tuple[str, ...]]:
    """A table of layouts, header first; empty if none were searched. With separate devices, prefill's layout comes
    first."""
    if not plan.ranked:
        return []
    head = ("layout", "context", "batch", "requests/s", "first", "a token", "busy")
    return [head, *(_ranked(one) for one in plan.ranked[:_RANKED])]


def as_json(plan: TargetPlan) -> dict[str, Any]:
    """What `jaxinfer plan --json` prints."""
    chosen = plan.chosen
    devices = [
        {"role": name, "stage": n, **_device(memory, n)}
        for name, shape, memory in plan.roles
        for n in range(len(shape.stages))
        for _ in range(shape.layout.tp)
    ]
    return {
        "target": str(plan.target),
        "fits": plan.fits,
        "compiled": plan.is_compiled,
        "devices": devices,
        "kv_tokens": plan.kv_tokens,
        "context": plan.setting.context,
        "batch": chosen.batch,
        "prefill_parallel": _parallel(chosen.layouts.prefill),
        "decode_parallel": _parallel(chosen.layouts.decode),
        "shares_devices": chosen.layouts.is_shared,
        "matrices": str(chosen.decode.template.weight_format),
        "stages": {name: [[s.layers.start, s.layers.stop] for s in shape.stages] for name, shape, _ in plan.roles},
        "steps": {"decode": _steps_json(plan.decode_steps), "prefill": _steps_json(plan.prefill_steps)},
        "collectives": {
            role: _collectives_json(programs, len(chosen.decode.work.layers))
            for role, programs in (("decode", plan.decode_programs), ("prefill", plan.prefill_programs))
        },
        "predicted": _candidate_json(chosen),
        "ranked": [_candidate_json(one) for one in plan.ranked],
        "would_fit": list(plan.changes),
        "notes": list(plan.notes),
    }


def _layout(plan: TargetPlan) -> str:
    layouts = plan.chosen.layouts
    if layouts.is_shared:
        return f"prefill and decode on the same {layouts.num_devices} device(s), {layouts.decode}"
    return f"prefill on {layouts.prefill.num_devices} device(s), {layouts.prefill}; decode on {layouts.decode.num_devices} others, {layouts.decode}"


def _stage(plan: TargetPlan, memory: RoleMemory, number: int, layers: range) -> str:
    stage = memory.stages[number]
    how = "compiled" if plan.is_compiled else "estimated"
    parts = [
        f"layers {layers.start} to {layers.stop - 1}",
        f"weights {format_bytes(stage.weight_bytes)}",
        f"activations {format_bytes(stage.activation_bytes)} ({how})",
        f"KV pages {format_bytes(memory.kv_bytes(number))}",
    ]
    unused = stage.room_bytes - memory.kv_bytes(number)
    if unused > 2 * stage.page_bytes:
        parts.append(f"unused {format_bytes(unused)}")
    if stage.missing_bytes:
        parts.append(f"too much by {format_bytes(stage.missing_bytes)}")
    return ", ".join(parts)


def _steps(steps: StepTimes) -> str:
    text = f"{_time(steps.round_seconds)}, most of it {steps.bound}"
    return text if len(steps.costs) == 1 else f"{text}; {steps.num_micro_batches} micro-batches, bubbles {steps.bubble_share:.0%}"


def _collectives(plan: TargetPlan) -> list[str]:
    """A line a role: collectives of each layer, and the others."""
    if not plan.is_compiled:
        return []
    chosen = plan.chosen
    lines = []
    for role, programs, shape in (("decode", plan.decode_programs, chosen.decode), ("prefill", plan.prefill_programs, chosen.prefill)):
        of_layer, besides = a_layer(programs, len(shape.work.layers))
        if not of_layer and not besides:
            lines.append(f"{role}: none")
            continue
        text = ", ".join(f"{count} x {collective}" for collective, count in of_layer) or "none"
        lines.append(f"{role}: {text} a layer, {sum(count for _, count in besides)} others, of {_bytes_of(besides)}")
    return lines


def a_layer(programs: Sequence[CompiledProgram], num_layers: int) -> tuple[list[tuple[Collective, int]], list[tuple[Collective, int]]]:
    """Collectives of all stages' programs: those that occur in each layer, and the rest, such as the embedding's and
    the sampler's."""
    total: Counter[Collective] = Counter()
    besides: Counter[Collective] = Counter()
    for program in programs:
        total.update(dict(program.collectives))
        besides.update(dict(program.of_sampling))
    of_layer = [(collective, count // num_layers) for collective, count in sorted(total.items()) if count >= num_layers]
    besides.update({collective: count % num_layers for collective, count in total.items() if count % num_layers})
    return of_layer, sorted(besides.items())


def _bytes_of(counted: Sequence[tuple[Collective, int]]) -> str:
    return format_bytes(sum(count * collective.num_bytes for collective, count in counted))


def _collectives_json(programs: Sequence[CompiledProgram], num_layers: int) -> dict[str, Any]:
    of_layer, besides = a_layer(programs, num_layers)

    def collectives_json(counted: list[tuple[Collective, int]]) -> list[dict[str, Any]]:
        return [{"kind": each.kind, "arrays": list(each.arrays), "bytes": each.num_bytes, "count": count} for each, count in counted]

    return {"a_layer": collectives_json(of_layer), "besides": collectives_json(besides)}


def _predicted(one: Candidate) -> list[str]:
    speed = one.speed
    lines = [
        f"{speed.requests_per_second:.2f} requests a second, {speed.output_tokens_per_second:,.0f} tokens a second out",
        f"first token after {_time(speed.first_token_seconds)}, then {_time(speed.token_seconds)} a token",
        f"prefill busy {speed.prefill_share:.0%}, decode {speed.decode_share:.0%}; work for devices of prefill : decode {_ratio(one)}",
    ]
    if speed.handoff_seconds:
        lines.append(f"hand-off of a prompt's pages {_time(speed.handoff_seconds)}")
    return lines


def _ratio(one: Candidate) -> str:
    """The work of both roles as the number of devices of these layouts that it would keep busy."""
    speed, layouts = one.speed, one.layouts
    prefill, decode = speed.prefill_share * layouts.prefill.num_devices, speed.decode_share * layouts.decode.num_devices
    return f"{prefill:.1f} : {decode:.1f}"


def _ranked(one: Candidate) -> tuple[str, ...]:
    speed, layouts = one.speed, one.layouts
    engines = f"{one.num_engines} x " if one.num_engines > 1 else ""
    return (
        engines + (str(layouts.decode) if layouts.is_shared else f"{layouts.prefill} > {layouts.decode}"),
        f"{one.kv_tokens:,}" if one.fits else "too little",
        str(one.batch),
        f"{one.num_engines * speed.requests_per_second:.2f}",
        _time(speed.first_token_seconds),
        _time(speed.token_seconds),
        f"{speed.prefill_share:.0%} {speed.decode_share:.0%}",
    )


def _candidate_json(one: Candidate) -> dict[str, Any]:
    speed = one.speed
    return {
        "prefill_parallel": _parallel(one.layouts.prefill),
        "decode_parallel": _parallel(one.layouts.decode),
        "shares_devices": one.layouts.is_shared,
        "engines": one.num_engines,
        "fits": one.fits,
        "kv_tokens": one.kv_tokens,
        "batch": one.batch,
        "requests_per_second": one.num_engines * speed.requests_per_second,
        "output_tokens_per_second": one.num_engines * speed.output_tokens_per_second,
        "first_token_seconds": speed.first_token_seconds,
        "token_seconds": speed.token_seconds,
        "prefill_busy_share": speed.prefill_share,
        "decode_busy_share": speed.decode_share,
        "handoff_seconds": speed.handoff_seconds,
    }


def _steps_json(steps: StepTimes) -> dict[str, Any]:
    return {
        "seconds": steps.round_seconds,
        "bound": steps.bound,
        "stage_seconds": list(steps.seconds),
        "micro_batches": steps.num_micro_batches,
        "bubble_share": steps.bubble_share,
    }


def _device(memory: RoleMemory, number: int) -> dict[str, int]:
    stage = memory.stages[number]
    return {
        "weights_bytes": stage.weight_bytes,
        "activation_bytes": stage.activation_bytes,
        "kv_bytes": memory.kv_bytes(number),
        "reserved_bytes": stage.reserved_bytes,
        "unused_bytes": stage.room_bytes - memory.kv_bytes(number),
    }


def _parallel(layout: Parallel) -> dict[str, int]:
    return {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
