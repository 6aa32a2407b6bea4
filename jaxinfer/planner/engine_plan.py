"""The engine's plan: a model placed on this machine's devices, with as many pages as their memory allows. No array is
made yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from checkpoints.source import TensorSource
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.config import ConfigError, EngineConfig, format_bytes
from jaxinfer.kv_cache.pages import PagePool, page_dtype
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.pipeline.stage import Stage
from jaxinfer.planner.backends import choose_attention, wrong_device
from jaxinfer.planner.kv_memory import kv_budget, max_context_tokens
from jaxinfer.planner.placement import DeviceKind, Layouts, Placement, Placer, RolePlacement
from jaxinfer.planner.stage_partition import cut
from jaxinfer.weights.expert_packing import choose_packing, dequantised
from jaxinfer.weights.formats.weight_format import MatrixAxes
from jaxinfer.weights.kept_blocks import KeptMatrices, kept_blocks
from jaxinfer.weights.template import ModelTemplate
from pallas_kernels.dispatch import KernelBackend
from sharding.layout import Parallel
from sharding.mesh import make_mesh
from sharding.rules import Rules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage: some layers, or all of them, on a mesh."""

    template: ModelTemplate
    mesh: jax.sharding.Mesh
    weight_bytes: int  # on each device


@dataclass(frozen=True)
class RolePlan:
    """The meshes, pages and attention backend of prefill or decode."""

    placement: RolePlacement
    stages: tuple[StagePlan, ...]
    num_pages: int  # of each stage's pool, the null page included
    attention: KernelBackend

    @property
    def role(self) -> str:
        """'prefill' or 'decode'."""
        return self.placement.role

    @property
    def layout(self) -> Parallel:
        return self.placement.layout

    @property
    def rules(self) -> Rules:
        return self.placement.rules

    @property
    def heads_cost(self) -> str | None:
        """The cost of padding heads to this many devices, as text; None where the devices divide them."""
        return self.placement.heads_cost

    @property
    def devices(self) -> list[jax.Device]:
        """All devices, stage by stage."""
        return [device for stage in self.stages for device in stage.mesh.devices.flat]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on one device, on the stage with the largest."""
        return max(stage.page_bytes for stage in self.placement.stages)

    def pools(self) -> list[PagePool]:
        """The page pool of each stage, not allocated yet."""
        spec = self.placement.spec
        dtype = page_dtype(spec, self.placement.template.activation_dtype, self.devices[0].platform)
        return [
            PagePool(
                spec,
                self.num_pages,
                dtype,
                stage.mesh,
                self.rules,
                stage.template.heads,
                stage.template.layers_of_group,
                len(stage.template.layers) if spec.is_float8 else 0,
            )
            for stage in self.stages
        ]

    def stages_with(self, pools: Sequence[PagePool], sequence_parallel: str) -> list[Stage]:
        """Stages for a runner. `pools`: this role's, or the other role's on the same devices."""
        return [
            Stage(stage.template, stage.mesh, self.rules, pool, self.attention, sequence_parallel)
            for stage, pool in zip(self.stages, pools, strict=True)
        ]


@dataclass(frozen=True)
class Plan:
    placement: Placement
    prefill: RolePlan
    decode: RolePlan
    max_model_len: int  # tokens, prompt plus output
    dequantised: Mapping[str, int]  # tensors of the checkpoint, by format, that are stored in another type here

    @property
    def template(self) -> ModelTemplate:
        return self.placement.template

    @property
    def page_spec(self) -> PageSpec:
        return self.placement.spec

    @property
    def has_stages(self) -> bool:
        """Whether a role is a pipeline of several stages."""
        return max(self.prefill.layout.pp, self.decode.layout.pp) > 1

    @property
    def shares_mesh(self) -> bool:
        return self.placement.layouts.is_shared


def make_plan(
    config: EngineConfig,
    architecture: ArchitectureConfig,
    source: TensorSource,
    incompressible: frozenset[MatrixAxes] = frozenset(),
) -> Plan:
    """Place a checkpoint's model on the configured devices. `incompressible`: see `lay_out`.

    Raises `ConfigError` for devices that do not exist, axes that do not divide, and memory that holds no page.
    """
    meshes = {role: _meshes(role, config) for role in ("prefill", "decode")}
    placement = place(config, architecture, source, incompressible, meshes["prefill"][0].devices.flat[0])
    for note in placement.notes:
        logger.info("%s", note)
    prefill, decode = (plan_role(each, meshes[each.role], config) for each in (placement.prefill, placement.decode))
    max_model_len = _max_model_len(config, architecture, placement.spec, prefill, decode)
    unpacked = {} if config.model.random_weights else dequantised(placement.template, source)
    return Plan(placement, prefill, decode, max_model_len, unpacked)


def place(
    config: EngineConfig,
    architecture: ArchitectureConfig,
    source: TensorSource,
    incompressible: frozenset[MatrixAxes],
    device: jax.Device,
) -> Placement:
    """Place a checkpoint's model on devices such as this one, laid out as configured. Raises `ConfigError`."""
    kind = DeviceKind(device.device_kind, device.platform, wrong_device("mosaic_gpu", device))

    def packing(template: ModelTemplate, num_devices: Sequence[int]) -> str | None:
        return choose_packing(template, source, num_devices)

    def kept(template: ModelTemplate) -> KeptMatrices:
        keeps = config.model.weights == "auto" and not config.model.random_weights
        return kept_blocks(template, source) if keeps else ()

    placer = Placer(architecture, config.model, kind, packing, config.cache.page_size, incompressible, kept, config.cache.kv_dtype)
    return placer.place(_layouts(config))


def plan_role(placement: RolePlacement, meshes: Sequence[jax.sharding.Mesh], config: EngineConfig) -> RolePlan:
    """A role on its meshes, one a stage, with as many pages as memory allows. Raises `ConfigError` if that is none."""
    for note in placement.notes:
        logger.info("%s: %s", placement.role, note)
    budgets = [kv_budget(config.cache.kv_memory, mesh, stage.weight_bytes) for mesh, stage in zip(meshes, placement.stages, strict=True)]
    try:
        for stage, budget in zip(placement.stages, budgets, strict=True):
            stage.page.check_room(budget)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return on_meshes(placement, meshes, placement.pages_within(budgets), config.devices.attention_backend, config.schedule.prefill_buckets)


def on_meshes(
    placement: RolePlacement,
    meshes: Sequence[jax.sharding.Mesh],
    num_pages: int,
    attention_backend: str,
    prefill_buckets: Sequence[int],
) -> RolePlan:
    """A role on these meshes, one a stage. Raises `ConfigError` for a named attention backend that can't run there."""
    templates = cut(placement.template, [stage.layers for stage in placement.stages])
    stages = tuple(
        StagePlan(template, mesh, stage.weight_bytes) for template, mesh, stage in zip(templates, meshes, placement.stages, strict=True)
    )
    config = placement.architecture
    attention = choose_attention(
        placement.role,
        attention_backend,
        meshes[0].devices.flat[0],
        page_dtype(placement.spec, placement.template.activation_dtype, meshes[0].devices.flat[0].platform),
        placement.stages[0].page,
        prefill_buckets,
        config.soft_cap,
        config.latent,
    )
    return RolePlan(placement, stages, num_pages, attention)


def _layouts(config: EngineConfig) -> Layouts:
    prefill, decode = ((config.devices.layout(role), list(config.devices.of_role(role))) for role in ("prefill", "decode"))
    return Layouts(prefill[0], decode[0], prefill == decode)


def _meshes(role: str, config: EngineConfig) -> list[jax.sharding.Mesh]:
    """One mesh a stage."""
    device_ids = config.devices.of_role(role)
    try:
        return [make_mesh(of_stage) for of_stage in config.devices.layout(role).stages(device_ids)]
    except ValueError as error:
        raise ConfigError(f"{role}_devices is {device_ids}: {error}") from error


def _max_model_len(config: EngineConfig, architecture: ArchitectureConfig, spec: PageSpec, *roles: RolePlan) -> int:
    """The longest context: any request must fit into either pool alone, or it would wait for ever. Raises
    `ConfigError` if the configured length does not fit."""
    num_pages, chunk_size = min(role.num_pages - 1 for role in roles), config.schedule.prefill_buckets[-1]
    wanted = config.model.max_model_len or architecture.max_position_embeddings
    capacity = max_context_tokens(spec, num_pages, chunk_size, wanted)
    if config.model.max_model_len is not None:
        if wanted > architecture.max_position_embeddings:
            raise ConfigError(f"max_model_len is {wanted}: this model's context is {architecture.max_position_embeddings} tokens")
        if wanted > capacity:
            needed = (spec.max_pages(wanted, chunk_size) + 1) * max(role.page_bytes for role in roles)
            raise ConfigError(
                f"max_model_len is {wanted} tokens, but kv_memory holds {capacity}: give kv_memory at least {format_bytes(needed)} or lower "
                "max_model_len"
            )
    return min(wanted, capacity)
