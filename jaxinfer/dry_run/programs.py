"""A layout's programs, compiled for the target: what each device needs beside weights and pages, and what devices say to each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.dry_run.shapes import RoleShape
from jaxinfer.dry_run.target import Target
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.plan import choose_attention
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.runtime.compilation import ProgramSource, compile_program
from jaxinfer.runtime.stage import Stage, program_name
from jaxinfer.runtime.stage_partition import cut
from jaxinfer.runtime.template import ModelTemplate
from sharding.collectives import Collective, collectives
from sharding.mesh import make_mesh
from sharding.targets import target_devices

_POOL_PAGES = 64  # of the pool that programs are compiled with: what else they need does not depend on it


@dataclass(frozen=True)
class Compiled:
    """One stage's program of a role, and on the last stage those that sample from what it gives."""

    name: str  # such as "decode/32"
    stays_bytes: int  # on each device: arguments beside weights and pages, of all micro-batches
    temporary_bytes: int
    collectives: tuple[tuple[Collective, int], ...]  # with how often they stand in its text
    of_sampling: tuple[tuple[Collective, int], ...] = ()  # as often as in those programs'


def compile_role(
    role: str, shape: RoleShape, spec: PageSpec, target: Target, first_device: int, context: int, size: int
) -> tuple[Compiled, ...]:
    """Of each stage, for steps of `size` rows of decode, or tokens of prefill. Raises `RuntimeError` where nothing compiles for such devices."""
    stages = role_stages(role, shape, spec, target, first_device, size, _POOL_PAGES)
    runner = (DecodeRunner if role == "decode" else PrefillRunner)(stages, (size,), context)
    sources = {source.name: source for source in runner.programs()}
    names = [program_name(f"{role}/{size}", stages, number) for number in range(len(stages))]
    num_lanes = len(stages) if role == "decode" else 1
    # Greedy rows need less than others, of the same.
    sampling = [source for name, source in sources.items() if name.startswith((f"{role}/sample/", f"{role}/score/"))]
    return tuple(_compiled(sources[name], sampling if name == names[-1] else [], num_lanes) for name in names)


def role_stages(role: str, shape: RoleShape, spec: PageSpec, target: Target, first_device: int, size: int, num_pages: int) -> list[Stage]:
    """Those of a role whose programs take so many rows or tokens, on the target's devices from `first_device` on, with pools of so many pages."""
    devices, config, dtype = _devices(target), shape.architecture, shape.template.activation_dtype
    of_stages = shape.layout.stages(range(first_device, first_device + shape.layout.num_devices))

    def stage(template: ModelTemplate, device_ids: Sequence[int]) -> Stage:
        mesh = make_mesh(device_ids, devices)
        pool = PagePool(spec, num_pages, dtype, mesh, shape.rules, template.heads, template.layers_of_group)
        of_device = spec.on_device(mesh.size, config.num_kv_heads, template.layers_of_group)
        attention = choose_attention(role, "auto", mesh.devices.flat[0], dtype, of_device, (size,), config.soft_cap, config.latent)
        return Stage(template, mesh, shape.rules, pool, attention, "auto")

    return list(map(stage, cut(shape.template, [of_stage.layers for of_stage in shape.stages]), of_stages))


def activation_bytes(decode: Sequence[Compiled], prefill: Sequence[Compiled]) -> list[int]:
    """Of each stage that runs both: what stays of both, and the temporaries of the one that needs more."""
    return [
        of_decode.stays_bytes + of_prefill.stays_bytes + max(of_decode.temporary_bytes, of_prefill.temporary_bytes)
        for of_decode, of_prefill in zip(decode, prefill, strict=True)
    ]


def _devices(target: Target) -> Sequence[jax.Device]:
    return jax.devices("cpu") if target.is_cpu else target_devices(target.card, target.num_devices)


def _compiled(source: ProgramSource, sampling: Sequence[ProgramSource], num_lanes: int) -> Compiled:
    program = compile_program(source)
    stays, temporaries, given = _device_bytes(source.arguments[2:]), *_temporaries(program)
    found: Counter[Collective] = Counter()
    for then in map(compile_program, sampling):
        temporaries = max(temporaries, given + _temporaries(then)[0])  # what it is given is held while it runs
        found += collectives(then.as_text() or "")
    stays += max((_device_bytes(one.arguments[2:]) for one in sampling), default=0)  # after the head's weights, and hidden states
    return Compiled(source.name, num_lanes * stays, temporaries, _listed(collectives(program.as_text() or "")), _listed(found))


def _temporaries(program: jax.stages.Compiled) -> tuple[int, int]:
    """Bytes on each device, while it runs and of what it gives: what is not written where it was is held twice."""
    memory = program.memory_analysis()
    assert memory is not None
    given = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + given, given


def _device_bytes(arguments: Any) -> int:
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(arguments))


def _listed(counted: Counter[Collective]) -> tuple[tuple[Collective, int], ...]:
    return tuple(sorted(counted.items()))
