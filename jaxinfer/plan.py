"""Plan: what a configuration comes to on this model and these devices: sizes, bytes and pages, before any array is made."""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp

from checkpoints.source import TensorSource
from jaxinfer.config import ConfigError, EngineConfig, ModelConfig, format_bytes, parse_bytes
from jaxinfer.kv_cache.spec import PageSpec, default_page_size
from jaxinfer.layers import moe
from jaxinfer.layers.matrices import ExpertFormat, MatrixFormat
from jaxinfer.models.config import ArchitectureConfig, LatentSizes
from jaxinfer.runtime.buckets import query_tile
from jaxinfer.runtime.expert_packing import choose_packing, dequantised
from jaxinfer.runtime.stage_partition import cut, stage_layers
from jaxinfer.runtime.template import ModelTemplate, Template, make_template
from jaxinfer.runtime.work import model_work
from pallas_kernels.dispatch import Backend
from pallas_kernels.latent_prefill_attention import op as latent_prefill_attention
from pallas_kernels.mosaic import card
from pallas_kernels.packed_matmul.op import unsupported_reason
from pallas_kernels.paged_attention import op as paged_attention
from pallas_kernels.ragged_prefill_attention import op as ragged_prefill_attention
from pallas_kernels.span import FULL_ATTENTION
from sharding.hardware import hardware_of
from sharding.layout import Parallel
from sharding.mesh import make_mesh, own_device
from sharding.rules import Rules, rules_for

logger = logging.getLogger(__name__)

Laid = TypeVar("Laid", bound=Template[Any])

CPU_KV_BYTES = 2**29  # of each device, where the configuration leaves it to the engine
_GPU_KV_SHARE = 0.85  # of what weights leave free; the rest is for temporaries

_ATTENTION_KERNELS: dict[str, Backend] = {"cpu": "llvm_cpu", "gpu": "mosaic_gpu"}  # by platform
_KERNELS_ARE_FOR = {"llvm_cpu": "CPUs", "mosaic_gpu": "NVIDIA GPUs"}


@dataclass(frozen=True)
class StagePlan:
    """Some of the layers, or all of them, on a mesh."""

    template: ModelTemplate
    mesh: jax.sharding.Mesh
    weight_bytes: int  # on each device


@dataclass(frozen=True)
class RolePlan:
    """What prefill or decode runs on."""

    role: str  # 'prefill' or 'decode'
    layout: Parallel
    stages: tuple[StagePlan, ...]
    rules: Rules
    num_pages: int  # of each stage's pool, the null page included
    page_bytes: int  # of the part of a page that a device has, of the stage with the largest
    attention: Backend

    @property
    def heads_cost(self) -> str | None:
        """What it costs that this many devices don't divide the model's heads; None where they do."""
        config = self.stages[0].template.config
        assert isinstance(config, ArchitectureConfig)
        return None if config.heads is None else config.heads.cost(has_latents=config.latent is not None)

    @property
    def devices(self) -> list[jax.Device]:
        """Stage by stage."""
        return [device for stage in self.stages for device in stage.mesh.devices.flat]


@dataclass(frozen=True)
class Plan:
    template: ModelTemplate
    page_spec: PageSpec
    prefill: RolePlan
    decode: RolePlan
    max_model_len: int  # tokens, prompt plus output
    dequantised: Mapping[str, int]  # tensors of the checkpoint, by format, that are not kept as they are there

    @property
    def has_stages(self) -> bool:
        """Whether a role's layers are cut into several."""
        return max(self.prefill.layout.pp, self.decode.layout.pp) > 1

    @property
    def shares_mesh(self) -> bool:
        return (self.prefill.layout, self.prefill.devices) == (self.decode.layout, self.decode.devices)


def make_plan(config: EngineConfig, architecture: ArchitectureConfig, source: TensorSource) -> Plan:
    """Lay a checkpoint's model out on the configured devices.

    Raises `ConfigError` for devices that do not exist, axes that do not divide, and memory that holds no page.
    """
    meshes = {role: _meshes(role, config) for role in ("prefill", "decode")}

    def build(form: MatrixFormat, activation_dtype: jnp.dtype, num_devices: int) -> ModelTemplate:
        return make_template(architecture.on_devices(num_devices), form, activation_dtype)

    template = lay_out(build, config.model, [(mesh, _rules(role, config)) for role, (mesh, *_) in meshes.items()])
    device, layouts = meshes["prefill"][0].devices.flat[0], {role: config.devices.layout(role) for role in meshes}
    template = _with_experts(template, architecture, source, device, layouts)
    page_size = config.cache.page_size or default_page_size(architecture, (layout.tp for layout in layouts.values()))
    spec = PageSpec.of(architecture, page_size, template.activation_dtype.itemsize)
    roles = {role: _plan_role(role, of_role, template, architecture, spec, config) for role, of_role in meshes.items()}
    # A request must fit alone in either pool, or it could wait for ever.
    num_pages, chunk_size = min(role.num_pages - 1 for role in roles.values()), config.schedule.prefill_buckets[-1]
    wanted = config.model.max_model_len or architecture.max_position_embeddings
    capacity = max_context_tokens(spec, num_pages, chunk_size, wanted)
    if config.model.max_model_len is not None:
        if wanted > architecture.max_position_embeddings:
            raise ConfigError(f"max_model_len is {wanted}: this model's context is {architecture.max_position_embeddings} tokens")
        if wanted > capacity:
            of_device = (spec.max_pages(wanted, chunk_size) + 1) * max(role.page_bytes for role in roles.values())
            raise ConfigError(
                f"max_model_len is {wanted} tokens, but kv_memory holds {capacity}: give kv_memory at least {format_bytes(of_device)} or lower "
                "max_model_len"
            )
    unpacked = {} if config.model.random_weights else dequantised(template, source)
    return Plan(template, spec, roles["prefill"], roles["decode"], min(wanted, capacity), unpacked)


def max_context_tokens(spec: PageSpec, num_pages: int, chunk_size: int, wanted: int) -> int:
    """The longest context that so many pages hold, up to a page more than `wanted`, computed in chunks of `chunk_size`."""
    runs = range(spec.blocks_for(wanted) + 1)
    return bisect_right(runs, num_pages, key=lambda run: spec.max_pages(run * spec.page_size, chunk_size)) * spec.page_size - spec.page_size


def lay_out(
    build: Callable[[MatrixFormat, jnp.dtype, int], Laid],
    config: ModelConfig,
    meshes: Sequence[tuple[jax.sharding.Mesh, Rules]],
    *,
    keeps_types: bool = False,
) -> Laid:
    """The template that `build` makes, for one device, of the best form of matrices for these meshes; its last argument is how many devices
    heads are split over. One that can't be split as it would have to be is left for `Template.abstract` to refuse."""
    form, activation_dtype = choose_formats(config, meshes[0][0].devices.flat[0].platform, keeps_types=keeps_types)
    if form.is_packed and config.matmul_backend == "auto":
        try:
            for mesh, rules in meshes:
                build(form, activation_dtype, mesh.size).abstract(mesh, rules)
        except ValueError as error:
            logger.info("matmul backend: xla after all (packed, %s)", error)
            form = replace(form, is_packed=False)
    return build(form, activation_dtype, 1)


def choose_formats(config: ModelConfig, platform: str, *, keeps_types: bool = False) -> tuple[MatrixFormat, jnp.dtype]:
    """The form of a model's matrices, and the type of activations and KV; with `keeps_types` no matrix becomes integers. On a CPU
    activations stay float32 whatever the weights: `layers.linear.product` says why.

    Raises `ConfigError` for a matmul backend that can't run here."""
    name = config.dtype
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(name if keeps_types or config.weights == "auto" else config.weights)
    against = f"its kernels are for CPUs, not {platform}" if platform != "cpu" else unsupported_reason(dtype)
    if config.matmul_backend == "packed" and against:
        raise ConfigError(f"matmul_backend is packed, but {against}: use auto or xla")
    is_packed = config.matmul_backend == "packed" or (config.matmul_backend == "auto" and not against)
    reason = "asked for" if config.matmul_backend != "auto" else against or "a kernel made for this processor"
    logger.info("matmul backend for %s: %s (%s)", dtype, "packed" if is_packed else "xla", reason)
    return MatrixFormat(dtype, is_packed), jnp.dtype("float32" if platform == "cpu" else name)


def _with_experts(
    template: ModelTemplate, architecture: ArchitectureConfig, source: TensorSource, device: jax.Device, layouts: Mapping[str, Parallel]
) -> ModelTemplate:
    """With experts, if any, as the checkpoint has them where that can be, and the best products with them that run here.

    Raises `ConfigError` for a layout that deals out experts that there are none of."""
    matrices = [leaf for leaf in template.leaves if leaf.is_of_experts]
    if not matrices:
        for role, layout in layouts.items():
            if layout.ep > 1:
                raise ConfigError(f"{role}_parallel is {layout}, but this model has no experts: leave out ep={layout.ep}")
        return template
    sizes = dict(zip(matrices[0].axes, matrices[0].shape, strict=True))
    num_devices = [layout.tp // layout.ep for layout in layouts.values()]  # that each expert is split over
    form = replace(template.form, experts=ExpertFormat(packing=choose_packing(template, source, num_devices)))
    against = _wrong_device("mosaic_gpu", device) or moe.unsupported_reason(
        sizes["embed"], sizes["expert_mlp"], max(num_devices), form, template.activation_dtype
    )
    backend: Literal["mosaic_gpu", "xla"] = "xla" if against else "mosaic_gpu"
    logger.info("products with experts: %s (%s)", backend, against or "a kernel made for this device")
    return make_template(architecture, replace(form, experts=replace(form.experts, backend=backend)), template.activation_dtype)


def choose_attention(
    role: str,
    name: str,
    device: jax.Device,
    dtype: jnp.dtype,
    spec: PageSpec,
    prefill_buckets: Sequence[int],
    soft_cap: float | None = None,
    latent: LatentSizes | None = None,
) -> Backend:
    """How a role's attention runs on such a device, over its part of pages of this type: in all layers alike. `latent`: what prefill makes of
    pages of latents.

    Raises `ConfigError` for a named backend that can't run here."""
    wanted = cast(Backend, _ATTENTION_KERNELS.get(device.platform, "xla") if name == "auto" else name)
    pages = wanted, dtype, spec.head_size, spec.part_size
    is_latent, tile = spec.num_sides == 1, math.gcd(*map(query_tile, prefill_buckets))
    against = _wrong_device(wanted, device)
    for span in spec.spans:
        if against is not None:
            break
        if role == "decode":
            is_plain = span == FULL_ATTENTION and soft_cap is None and not is_latent
            against = paged_attention.unsupported_reason(*pages, is_plain=is_plain, is_latent=is_latent, card=card.card_of(device))
        elif latent is not None:
            sizes = (latent.nope_size, latent.rope_size), latent.value_size
            against = latent_prefill_attention.unsupported_reason(wanted, dtype, *sizes, spec.page_size, tile, card.card_of(device))
        else:
            against = ragged_prefill_attention.unsupported_reason(*pages, tile, span, soft_cap, card.card_of(device))
    if name != "auto" and against:
        raise ConfigError(f"attention_backend is {name}, but {against}: use auto or xla")
    backend: Backend = "xla" if against else wanted
    reason = against or ("asked for" if name != "auto" else f"the best for {device.device_kind}")
    logger.info("%s attention backend: %s (%s)", role, backend, reason)
    return backend


def _wrong_device(backend: Backend, device: jax.Device) -> str | None:
    """Why a backend's kernels don't run on a device whatever they are for; None if they do."""
    if backend not in _KERNELS_ARE_FOR:
        return None
    if _ATTENTION_KERNELS.get(device.platform) != backend:
        return f"its kernels are for {_KERNELS_ARE_FOR[backend]}, not {device.platform}"
    return card.unsupported_reason(device) if backend == "mosaic_gpu" else None


def _meshes(role: str, config: EngineConfig) -> list[jax.sharding.Mesh]:
    """One for each stage."""
    device_ids = config.devices.of_role(role)
    try:
        return [make_mesh(of_stage) for of_stage in config.devices.layout(role).stages(device_ids)]
    except ValueError as error:
        raise ConfigError(f"{role}_devices is {device_ids}: {error}") from error


def _rules(role: str, config: EngineConfig) -> Rules:
    return rules_for(role, config.devices.layout(role).ep)


def _plan_role(
    role: str,
    meshes: Sequence[jax.sharding.Mesh],
    template: ModelTemplate,
    architecture: ArchitectureConfig,
    spec: PageSpec,
    config: EngineConfig,
) -> RolePlan:
    layout, rules = config.devices.layout(role), _rules(role, config)
    own = architecture.on_devices(layout.tp)
    if own.heads is not None:
        logger.info("%s: %s", role, own.heads.cost(has_latents=own.latent is not None))
        template = make_template(own, template.form, template.activation_dtype)
    try:
        templates = cut(template, _stage_layers(role, template, rules, meshes[0].devices.flat[0], config))
        on_meshes = [of_stage.abstract(mesh, rules) for of_stage, mesh in zip(templates, meshes, strict=True)]
    except ValueError as error:
        raise ConfigError(f"{role}_parallel is {layout}: {error}") from error
    weights = [sum(math.prod(w.sharding.shard_shape(w.shape)) * w.dtype.itemsize for w in on_mesh) for on_mesh in on_meshes]
    stages = tuple(map(StagePlan, templates, meshes, weights))
    # The pool is split over the mesh by KV heads, or by tokens of latents, so each device holds a part of every page.
    of_device = [spec.on_device(layout.tp, own.num_kv_heads, stage.template.layers_of_group) for stage in stages]
    if latents := spec.latents_on(layout.tp):
        logger.info("%s: latents are %s", role, latents)
    try:
        num_pages = min(
            part.num_pages(_kv_budget(config.cache.kv_memory, stage.mesh, stage.weight_bytes))
            for part, stage in zip(of_device, stages, strict=True)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    mesh = meshes[0]
    attention = choose_attention(
        role,
        config.devices.attention_backend,
        mesh.devices.flat[0],
        template.activation_dtype,
        of_device[0],
        config.schedule.prefill_buckets,
        architecture.soft_cap,
        architecture.latent,
    )
    return RolePlan(role, layout, stages, rules, num_pages, max(part.page_bytes for part in of_device), attention)


def _stage_layers(role: str, template: ModelTemplate, rules: Rules, device: jax.Device, config: EngineConfig) -> list[range]:
    """Raises `ValueError` for more stages than layers."""
    devices, layout = config.devices, config.devices.layout(role)
    if layout.pp == 1:
        return [range(len(template.layers))]  # an encoder too, whose work isn't known
    is_shared = len({(devices.layout(each), tuple(devices.of_role(each))) for each in ("prefill", "decode")}) == 1
    return stage_layers(
        model_work(template, rules), layout, ("prefill", "decode") if is_shared else (role,), hardware_of(device.device_kind)
    )


def _kv_budget(kv_memory: str, mesh: jax.sharding.Mesh, weights: int) -> int:
    device = own_device(mesh)
    if kv_memory == "auto" and device.platform != "cpu" and jax.process_count() > 1:
        raise ConfigError("kv_memory is auto, but each process would find another size: give one, such as 40GiB")
    stats = device.memory_stats() if device.platform != "cpu" else None
    if kv_memory != "auto":
        budget = parse_bytes("kv_memory", kv_memory)
        memory = stats["bytes_limit"] if stats else _machine_bytes()
        if budget > memory:
            raise ConfigError(f"kv_memory is {kv_memory}, but {device} has {format_bytes(memory)}: give less, or auto")
        return budget
    if not stats:
        return CPU_KV_BYTES
    return max(int((stats["bytes_limit"] - stats["bytes_in_use"] - weights) * _GPU_KV_SHARE), 0)


def _machine_bytes() -> int:
    """What a CPU device has: the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
