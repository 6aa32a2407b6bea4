"""A layout's programs compiled for the target: memory of each device beside weights and pages, and collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.pipeline.stage import Stage, program_name
from jaxinfer.planner.engine_plan import on_meshes
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.target import Target
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.compilation import ProgramSource, compile_program
from sharding.collectives import Collective, collectives
from sharding.mesh import make_mesh
from sharding.targets import target_devices

_POOL_PAGES = 64  # of the pool to compile with; other memory does not depend on it


@dataclass(frozen=True)
class CompiledProgram:
    """One stage's program of a role; on the last stage also the programs that sample from its output."""

    name: str  # such as "decode/32"
    stays_bytes: int  # on each device: arguments besides weights and pages, of all micro-batches
    temporary_bytes: int
    collectives: tuple[tuple[Collective, int], ...]  # each with its number of occurrences in the program
    of_sampling: tuple[tuple[Collective, int], ...] = ()  # the same for the sampling programs


def compile_role(shape: RolePlacement, target: Target, first_device: int, context: int, size: int) -> tuple[CompiledProgram, ...]:
    """The program of each stage, for `size` rows of decode or tokens of prefill. Raises `RuntimeError` if nothing here
    compiles for such devices."""
    role, stages = shape.role, role_stages(shape, target, first_device, size, _POOL_PAGES)
    runner = (DecodeRunner if role == "decode" else PrefillRunner)(stages, (size,), context)
    sources = {source.name: source for source in runner.programs()}
    names = [program_name(f"{role}/{size}", stages, number) for number in range(len(stages))]
    num_micro_batches = len(stages) if role == "decode" else 1
    # Greedy sampling uses the same arrays, and fewer of them.
    sampling = [source for name, source in sources.items() if name.startswith((f"{role}/sample/", f"{role}/score/"))]
    return tuple(_compiled(sources[name], sampling if name == names[-1] else [], num_micro_batches) for name in names)


def role_stages(shape: RolePlacement, target: Target, first_device: int, size: int, num_pages: int) -> list[Stage]:
    """A role's stages for programs of this size, on the target's devices from `first_device` on, with pools of
    `num_pages`."""
    devices, last_device = _devices(target), first_device + shape.layout.num_devices
    meshes = [make_mesh(device_ids, devices) for device_ids in shape.layout.stages(range(first_device, last_device))]
    plan = on_meshes(shape, meshes, num_pages, "auto", (size,))
    return plan.stages_with(plan.pools(), "auto")


def activation_bytes(decode: Sequence[CompiledProgram], prefill: Sequence[CompiledProgram]) -> list[int]:
    """For each stage that both roles share: what stays of both, and the larger temporaries."""
    return [
        of_decode.stays_bytes + of_prefill.stays_bytes + max(of_decode.temporary_bytes, of_prefill.temporary_bytes)
        for of_decode, of_prefill in zip(decode, prefill, strict=True)
    ]


def _devices(target: Target) -> Sequence[jax.Device]:
    return jax.devices("cpu") if target.is_cpu else target_devices(target.card, target.num_devices)


def _compiled(source: ProgramSource, sampling: Sequence[ProgramSource], num_micro_batches: int) -> CompiledProgram:
    program = compile_program(source)
    stays, temporaries, given = _device_bytes(source.arguments[2:]), *_temporaries(program)
    found: Counter[Collective] = Counter()
    for then in map(compile_program, sampling):
        temporaries = max(temporaries, given + _temporaries(then)[0])  # the sampler's input is alive while it runs
        found += collectives(then.as_text() or "")
    # Its first two arguments are the head's weights and hidden states.
    stays += max((_device_bytes(one.arguments[2:]) for one in sampling), default=0)
    return CompiledProgram(
        source.name, num_micro_batches * stays, temporaries, _listed(collectives(program.as_text() or "")), _listed(found)
    )


def _temporaries(program: jax.stages.Compiled) -> tuple[int, int]:
    """Bytes on each device: in use during a run, and of its outputs. An output that is not donated counts in both."""
    memory = program.memory_analysis()
    assert memory is not None
    given = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + given, given


def _device_bytes(arguments: Any) -> int:
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(arguments))


def _listed(counted: Counter[Collective]) -> tuple[tuple[Collective, int], ...]:
    return tuple(sorted(counted.items()))
