"""What an engine tells of its start: devices, layouts, and where the memory went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxinfer.config import EngineConfig, ScheduleConfig
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.plan import Plan, max_context_tokens
from jaxinfer.runtime.buckets import prefill_rows
from jaxinfer.runtime.compilation import Executable
from jaxinfer.runtime.stage import program_name
from jaxinfer.stats import EngineStats


def mesh_names(plan: Plan) -> tuple[str, ...]:
    """Of the meshes, as statistics have them."""
    return ("shared",) if plan.shares_mesh else ("prefill", "decode")


def report_start(
    stats: EngineStats, config: EngineConfig, plan: Plan, programs: Mapping[str, Executable], pools: Sequence[Sequence[PagePool]]
) -> None:
    """`pools`: of each mesh's stages."""
    stats.num_programs += len(programs)
    stats.prefill_devices, stats.decode_devices = tuple(map(str, plan.prefill.devices)), tuple(map(str, plan.decode.devices))
    stats.prefill_layout, stats.decode_layout = str(plan.prefill.layout), str(plan.decode.layout)
    stats.prefill_pages, stats.decode_pages = plan.prefill.num_pages - 1, plan.decode.num_pages - 1
    unpacked = ", ".join(f"{count} {name}" for name, count in plan.dequantised.items())
    stats.weights = f"{plan.template.form}{unpacked and f' (dequantised: {unpacked})'}"
    most, chunk_size = plan.decode.num_pages * plan.page_spec.page_size, config.schedule.prefill_buckets[-1]
    stats.kv_tokens = max_context_tokens(plan.page_spec, stats.decode_pages, chunk_size, most)
    names = mesh_names(plan)
    for name, role, of_role in zip(names, (plan.prefill, plan.decode)[-len(names) :], pools, strict=True):
        if role.heads_cost is not None:
            stats.heads[name] = role.heads_cost
        if latents := plan.page_spec.latents_on(role.layout.tp):
            stats.latents[name] = latents
        for number, (stage, pool) in enumerate(zip(role.stages, of_role, strict=True)):
            of = program_name(name, role.stages, number)
            ending = program_name("", role.stages, number)
            of_stage = [p for key, p in programs.items() if (plan.shares_mesh or key.startswith(name)) and key.endswith(ending)]
            stats.memory[f"{of} weights"] = stage.weight_bytes
            stats.memory[f"{of} KV pages"] = pool.device_bytes
            if stage.template.is_last:
                stats.memory[f"{of} token counts"] = _count_bytes(plan, config.schedule, name) // role.layout.tp
            stats.memory[f"{of} temporaries"] = max(p.memory_analysis().temp_size_in_bytes for p in of_stage)  # type: ignore[attr-defined]


def _count_bytes(plan: Plan, schedule: ScheduleConfig, name: str) -> int:
    """Of all counts of tokens, which are split over a stage's devices as the vocabulary is."""
    num_lanes = plan.decode.layout.pp
    slots = num_lanes * (-(-schedule.max_batch_size // num_lanes) + 1)  # of each lane one more, for padding
    rows = prefill_rows(schedule.prefill_buckets[-1])
    num_counts = {"shared": slots + rows, "prefill": rows, "decode": slots}[name]
    return num_counts * plan.template.config.vocab_size * (np.dtype(bool).itemsize + np.dtype(np.int32).itemsize)
