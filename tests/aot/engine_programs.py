"""The engine's own programs of a model, compiled for GPUs that nobody here has."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.decode.batch import empty_batch
from jaxinfer.decode.program import forward_step
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.decode.state import abstract_state
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec, default_page_size
from jaxinfer.pipeline.expert_loads import ExpertLoads
from jaxinfer.pipeline.stage import Stage
from jaxinfer.planner.backends import choose_attention
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.compilation import ProgramSource, abstract_like, compile_program
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import make_template
from pallas_kernels.dispatch import KernelBackend
from sharding.mesh import make_mesh
from sharding.partition import replicated
from sharding.rules import TENSOR_PARALLEL
from sharding.targets import target_devices

BFLOAT16 = jnp.dtype("bfloat16")
_ARRAY = re.compile(r"= (pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]+)\]\S* (copy|dynamic-slice|concatenate|transpose)\(")


@dataclass(frozen=True)
class EngineProgram:
    compiled: Any
    attention: KernelBackend
    spec: PageSpec
    pool_bytes: int  # on each device, as are the next two
    weight_bytes: int
    largest_weight: int


def compile_for(
    target: str,
    num_devices: int,
    config: ArchitectureConfig,
    weight_format: ModelWeightFormat,
    name: str,
    *,
    num_pages: int,
    context: int,
    sequence_parallel: str = "auto",
) -> EngineProgram:
    """A program such as 'decode/32', 'prefill/512' or 'decode/sample/32', of a model split over so many cards, whose pool has so many pages of 16
    tokens, or of latents of 16 for each card."""
    role, *_, size = name.split("/")
    stage = _stage(target, num_devices, config, weight_format, role, int(size), num_pages, sequence_parallel)
    runner = {"decode": DecodeRunner, "prefill": PrefillRunner}[role]
    programs = {p.name: p for p in runner([stage], (int(size),), context).programs()}
    return _compiled(stage, programs[name])


def compile_for_several_tokens(
    target: str, num_devices: int, config: ArchitectureConfig, num_rows: int, num_new: int, *, num_pages: int, context: int
) -> EngineProgram:
    """Decode's `forward_step` of so many new tokens a row, in bfloat16. The engine launches steps of one token only so far."""
    stage = _stage(target, num_devices, config, ModelWeightFormat(Plain(BFLOAT16)), "decode", num_rows, num_pages, "auto")
    on_mesh, spec, template = replicated(stage.mesh), stage.pool.spec, stage.template
    state = abstract_state(stage, num_rows, spec.blocks_for(context) * spec.num_groups, is_last=True)
    arguments = (
        template.abstract(stage.mesh, stage.rules),
        stage.pool.abstract,
        stage.pool.abstract_scales,
        state.of_layers,
        abstract_like(empty_batch(num_rows, num_rows, spec.num_groups, num_new), on_mesh),
        ExpertLoads([stage]).abstract[0],
        jax.ShapeDtypeStruct((num_rows + 1,), jnp.int32, sharding=on_mesh),
    )
    step = forward_step(template, stage.mesh, stage.attention)
    return _compiled(stage, ProgramSource("several tokens", step, arguments, stage.mesh, donated=(1, 3)))


def _stage(
    target: str,
    num_devices: int,
    config: ArchitectureConfig,
    weight_format: ModelWeightFormat,
    role: str,
    size: int,
    num_pages: int,
    sequence_parallel: str,
) -> Stage:
    own = config.on_devices(num_devices)
    template = make_template(own, weight_format)
    mesh = make_mesh(range(num_devices), target_devices(target, num_devices))
    spec = PageSpec.of(config, default_page_size(config, (num_devices,)), BFLOAT16.itemsize)
    pool = PagePool(spec, num_pages, BFLOAT16, mesh, TENSOR_PARALLEL, own.heads)
    of_device = spec.on_device(num_devices, own.num_kv_heads, template.layers_of_group)
    attention = choose_attention(role, "auto", mesh.devices.flat[0], BFLOAT16, of_device, (size,), config.soft_cap, config.latent)
    return Stage(template, mesh, TENSOR_PARALLEL, pool, attention, sequence_parallel)


def _compiled(stage: Stage, program: ProgramSource) -> EngineProgram:
    abstract = stage.template.abstract(stage.mesh, TENSOR_PARALLEL)
    weights = [math.prod(w.sharding.shard_shape(w.shape)) * w.dtype.itemsize for w in abstract]
    spec, pool_bytes = stage.pool.spec, stage.pool.device_bytes
    return EngineProgram(compile_program(program), stage.attention, spec, pool_bytes, sum(weights), max(weights))


def first_layers(config: ArchitectureConfig, num_layers: int) -> ArchitectureConfig:
    """The same model with only its first layers."""
    return replace(config, num_layers=num_layers, spans=config.spans[:num_layers])


def large_copies(program: str, size: int) -> list[str]:
    """What a program moves about without computing anything, of at least so many bytes."""
    found = []
    for match in _ARRAY.finditer(program):
        bits, dims = int(match[2] or 8), [int(d) for d in match[3].split(",")]
        if math.prod(dims) * bits // 8 >= size:
            found.append(match[0])
    return found
