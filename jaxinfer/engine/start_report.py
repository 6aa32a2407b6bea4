"""What an engine reports of its start: devices, layouts, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxinfer.config import EngineConfig, ScheduleConfig
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.pipeline.stage import program_name
from jaxinfer.planner.engine_plan import Plan
from jaxinfer.planner.kv_memory import device_bytes, max_context_tokens
from jaxinfer.programs.buckets import prefill_rows
from jaxinfer.programs.compilation import Executable
from jaxinfer.stats import EngineStats
from jaxinfer.weights.format_choice import compute_type


def mesh_names(plan: Plan) -> tuple[str, ...]:
    """Names of the meshes in statistics."""
    return ("shared",) if plan.shares_mesh else ("prefill", "decode")


def report_start(
    stats: EngineStats, config: EngineConfig, plan: Plan, programs: Mapping[str, Executable], pools: Sequence[Sequence[PagePool]]
) -> None:
    """Fill in what `stats` reports of the start. `pools`: of each mesh's stages."""
    stats.num_programs += len(programs)
    stats.device_bytes = device_bytes(plan.decode.devices[0])
    stats.prefill_devices, stats.decode_devices = tuple(map(str, plan.prefill.devices)), tuple(map(str, plan.decode.devices))
    stats.prefill_layout, stats.decode_layout = str(plan.prefill.layout), str(plan.decode.layout)
    stats.prefill_pages, stats.decode_pages = plan.prefill.num_pages - 1, plan.decode.num_pages - 1
    unpacked = ", ".join(f"{count} {name}" for name, count in plan.dequantised.items())
    stats.compute_type = "{} ({})".format(*compute_type(config.model, plan.decode.devices[0].platform))
    stats.weights = f"{plan.template.weight_format}{unpacked and f' (dequantised: {unpacked})'}"
    most, chunk_size = plan.decode.num_pages * plan.page_spec.page_size, config.schedule.prefill_buckets[-1]
    stats.kv_tokens = max_context_tokens(plan.page_spec, stats.decode_pages, chunk_size, most)
    stats.kv_dtype = str(plan.template.activation_dtype)  # of float8 the scales are told once they are known
    names = mesh_names(plan)
    for name, role, stage_pools in zip(names, (plan.prefill, plan.decode)[-len(names) :], pools, strict=True):
        if role.heads_cost is not None:
            stats.heads[name] = role.heads_cost
        if latents := plan.page_spec.latents_on(role.layout.tp):
            stats.latents[name] = latents
        for number, (stage, pool) in enumerate(zip(role.stages, stage_pools, strict=True)):
            of = program_name(name, role.stages, number)
            ending = program_name("", role.stages, number)
            of_stage = _largest(
                {key: p for key, p in programs.items() if (plan.shares_mesh or key.startswith(name)) and key.endswith(ending)}
            )
            stats.memory[f"{of} weights"] = stage.weight_bytes
            stats.memory[f"{of} KV pages"] = pool.device_bytes
            if stage.template.is_last:
                stats.memory[f"{of} token counts"] = _count_bytes(plan, config.schedule, name) // role.layout.tp
            stats.memory[f"{of} temporaries"] = max(p.memory_analysis().temp_size_in_bytes for p in of_stage)  # type: ignore[attr-defined]


def _largest(programs: Mapping[str, Executable]) -> list[Executable]:
    """Of the programs that differ in their padded size the largest. XLA takes 30 ms to tell of one of 30 layers."""
    sizes = sorted(programs, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return list({re.sub(r"\d+", "", name): programs[name] for name in sizes}.values())


def _count_bytes(plan: Plan, schedule: ScheduleConfig, name: str) -> int:
    """Bytes of all token counts for penalties, which are split over a stage's devices as the vocabulary is."""
    num_micro_batches = plan.decode.layout.pp
    # Each micro-batch has one more slot, for padding.
    slots = num_micro_batches * (-(-schedule.max_batch_size // num_micro_batches) + 1)
    rows = prefill_rows(schedule.prefill_buckets[-1])
    num_counts = {"shared": slots + rows, "prefill": rows, "decode": slots}[name]
    return num_counts * plan.template.config.vocab_size * (np.dtype(bool).itemsize + np.dtype(np.int32).itemsize)
