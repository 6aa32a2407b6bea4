"""The engine's own programs of a model, compiled for GPUs that nobody here has."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec, default_page_size
from jaxinfer.pipeline.stage import Stage
from jaxinfer.planner.backends import choose_attention
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.compilation import compile_program
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import make_template
from pallas_kernels.dispatch import KernelBackend
from sharding.mesh import make_mesh
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
    own = config.on_devices(num_devices)
    template = make_template(own, weight_format)
    mesh = make_mesh(range(num_devices), target_devices(target, num_devices))
    spec = PageSpec.of(config, default_page_size(config, (num_devices,)), BFLOAT16.itemsize)
    pool = PagePool(spec, num_pages, BFLOAT16, mesh, TENSOR_PARALLEL, own.heads)
    role, *_, size = name.split("/")
    of_device = spec.on_device(num_devices, own.num_kv_heads, template.layers_of_group)
    attention = choose_attention(role, "auto", mesh.devices.flat[0], BFLOAT16, of_device, (int(size),), config.soft_cap, config.latent)
    runner = {"decode": DecodeRunner, "prefill": PrefillRunner}[role]
    stage = Stage(template, mesh, TENSOR_PARALLEL, pool, attention, sequence_parallel)
    programs = {p.name: p for p in runner([stage], (int(size),), context).programs()}
    weights = [math.prod(w.sharding.shard_shape(w.shape)) * w.dtype.itemsize for w in template.abstract(mesh, TENSOR_PARALLEL)]
    return EngineProgram(compile_program(programs[name]), attention, spec, pool.device_bytes, sum(weights), max(weights))


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
