"""Placement of a model in a layout: layers on stages, heads and weights on devices, pages on both.

The engine and `jaxinfer plan` share it. It is pure arithmetic: it needs no device, mesh or array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.config import ConfigError, ModelConfig
from jaxinfer.kv_cache.spec import FLOAT8_BYTES, LayerGroups, PageSpec, default_page_size
from jaxinfer.layers import moe
from jaxinfer.planner.model_work import ModelWork, WeightBytes, model_work, weight_bytes
from jaxinfer.planner.stage_partition import stage_layers
from jaxinfer.weights.expert_packing import lossless_packing
from jaxinfer.weights.format_choice import lay_out
from jaxinfer.weights.formats.weight_format import ExpertFormat, MatrixAxes, ModelWeightFormat
from jaxinfer.weights.kept_blocks import KeptMatrices, undivided
from jaxinfer.weights.template import ModelTemplate, make_template
from sharding.hardware import hardware_for
from sharding.layout import Parallel
from sharding.mesh import TENSOR
from sharding.rules import Rules, rules_for

ChoosePacking = Callable[[ModelTemplate, Sequence[int]], str | None]  # for experts; how many devices split each expert
ChooseKept = Callable[[ModelTemplate], KeptMatrices]  # matrices that stay in their checkpoint's format


@dataclass(frozen=True)
class DeviceKind:
    """What placement needs to know of the devices."""

    name: str  # a key of `sharding.hardware.hardware_for`
    platform: str  # such as "cpu"
    no_expert_kernels: str | None  # why the expert kernels can't run there; None if they can


@dataclass(frozen=True)
class Layouts:
    """The layouts of both roles: on the same devices if shared, otherwise prefill's devices come first."""

    prefill: Parallel
    decode: Parallel
    is_shared: bool

    @property
    def num_devices(self) -> int:
        return self.decode.num_devices + (0 if self.is_shared else self.prefill.num_devices)

    def __str__(self) -> str:
        return f"both {self.decode}" if self.is_shared else f"prefill {self.prefill}; decode {self.decode}"


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A whole model, sharded over one stage's number of devices."""

    template: ModelTemplate  # with the heads of these devices
    rules: Rules
    is_float8: bool = False  # whether keys and values are

    @cached_property
    def weights(self) -> WeightBytes:
        return weight_bytes(self.template, self.rules)

    @cached_property
    def work(self) -> ModelWork:
        """Slower than all else here; needed only for pipeline stages and for step times."""
        return model_work(self.template, self.rules, FLOAT8_BYTES if self.is_float8 else None)


@dataclass(frozen=True)
class StagePlacement:
    """What each device of a stage stores."""

    layers: range
    weight_bytes: int
    page: PageSpec  # a device's part of a page

    @property
    def page_bytes(self) -> int:
        return self.page.page_bytes


@dataclass(frozen=True)
class RolePlacement:
    """A model in the layout of one role."""

    role: str  # 'prefill' or 'decode'
    layout: Parallel
    model: ShardedModel
    spec: PageSpec  # a whole page
    stages: tuple[StagePlacement, ...]

    @property
    def template(self) -> ModelTemplate:
        """The whole model, with the heads of these meshes."""
        return self.model.template

    @property
    def rules(self) -> Rules:
        return self.model.rules

    @property
    def work(self) -> ModelWork:
        return self.model.work

    @property
    def architecture(self) -> ArchitectureConfig:
        assert isinstance(self.template.config, ArchitectureConfig)
        return self.template.config

    @property
    def heads_cost(self) -> str | None:
        """The cost of padding heads to this many devices, as text; None where the devices divide them."""
        config = self.architecture
        return None if config.heads is None else config.heads.cost(has_latents=config.latent is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What this layout costs, as text."""
        latents = self.spec.latents_on(self.layout.tp)
        return tuple(filter(None, (self.heads_cost, latents and f"latents: {latents}")))

    def pages_within(self, budgets: Sequence[int]) -> int:
        """Number of pages, the null page included, for a budget in bytes for each device of each stage. All stages hold
        every page, so the smallest counts."""
        return min(budget // stage.page_bytes for stage, budget in zip(self.stages, budgets, strict=True))


@dataclass(frozen=True)
class Placement:
    """A model in the layouts of both roles."""

    layouts: Layouts
    template: ModelTemplate  # with the model's own heads
    spec: PageSpec
    prefill: RolePlacement
    decode: RolePlacement
    notes: tuple[str, ...]  # on the choice of expert kernels


class Placer:
    """Places one model on devices of one kind, in any layouts; caches what layouts have in common."""

    def __init__(
        self,
        architecture: ArchitectureConfig,
        config: ModelConfig,
        device: DeviceKind,
        choose_packing: ChoosePacking,
        page_size: int | None = None,
        incompressible: frozenset[MatrixAxes] = frozenset(),
        choose_kept: ChooseKept = lambda _: (),
        kv_dtype: str = "auto",
    ) -> None:
        self.architecture = architecture
        self._config, self._device, self._choose_packing, self._page_size = config, device, choose_packing, page_size
        self._incompressible, self._choose_kept, self._kv_dtype = incompressible, choose_kept, kv_dtype
        self._templates: dict[tuple[ArchitectureConfig, ModelWeightFormat], ModelTemplate] = {}
        self._formats: dict[tuple[tuple[int, int], ...], tuple[ModelTemplate, tuple[str, ...]]] = {}
        self._sharded: dict[tuple[ModelWeightFormat, int, int], ShardedModel | ValueError] = {}

    def place(self, layouts: Layouts) -> Placement:
        """Raises `ConfigError` for expert parallelism without experts, axes that a layout doesn't divide, and more
        stages than layers; the message names what would work."""
        roles = {"prefill": layouts.prefill, "decode": layouts.decode}
        for role, layout in roles.items():
            if layout.ep > 1 and getattr(self.architecture.family, "routing", None) is None:
                raise ConfigError(f"{role}_parallel is {layout}, but this model has no experts: leave out ep={layout.ep}")
        template, notes = self._whole(tuple((layout.tp, layout.ep) for layout in roles.values()))
        page_size = self._page_size or default_page_size(self.architecture, (layout.tp for layout in roles.values()))
        spec = PageSpec.of(self.architecture, page_size, template.activation_dtype.itemsize if self._kv_dtype == "auto" else FLOAT8_BYTES)
        cut_for = {role: ("prefill", "decode") if layouts.is_shared else (role,) for role in roles}
        prefill, decode = (self._place_role(role, layout, template, spec, cut_for[role]) for role, layout in roles.items())
        return Placement(layouts, template, spec, prefill, decode, notes)

    def _place_role(self, role: str, layout: Parallel, template: ModelTemplate, spec: PageSpec, cut_for: Sequence[str]) -> RolePlacement:
        """`cut_for`: the roles that run on its devices."""
        try:
            model = self._on_stage(template, layout)
            num_layers = self.architecture.num_layers
            is_cut = layout.pp > 1
            ranges = stage_layers(model.work, layout, cut_for, hardware_for(self._device.name)) if is_cut else [range(num_layers)]
        except ValueError as error:
            raise ConfigError(f"{role}_parallel is {layout}: {error}") from error
        groups, own = LayerGroups.of(self.architecture.layer_spans), model.template.config
        assert isinstance(own, ArchitectureConfig)
        stages = tuple(
            StagePlacement(
                layers,
                model.weights.on_device(layers, layout.tp),
                spec.on_device(layout.tp, own.num_kv_heads, groups.of_stage(layers).size if is_cut else groups.size),
            )
            for layers in ranges
        )
        return RolePlacement(role, layout, model, spec, stages)

    def _on_stage(self, template: ModelTemplate, layout: Parallel) -> ShardedModel:
        """Raises `ValueError` for an axis that the devices don't divide."""
        key = template.weight_format, layout.tp, layout.ep
        if key not in self._sharded:
            model = ShardedModel(
                self._template(layout.tp, template.weight_format, template.activation_dtype),
                rules_for("decode", layout.ep),
                self._kv_dtype == "fp8",
            )
            try:
                model.template.abstract(_mesh(layout.tp), model.rules)
                self._sharded[key] = model
            except ValueError as error:
                self._sharded[key] = error
        found = self._sharded[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def _whole(self, sizes: tuple[tuple[int, int], ...]) -> tuple[ModelTemplate, tuple[str, ...]]:
        """The model with the best weight formats for stages of these sizes (`tp`, `ep` of each role); and notes."""
        if sizes not in self._formats:
            meshes = [(_mesh(tp), rules_for("decode", ep)) for tp, ep in sizes]
            template = lay_out(
                self._build,
                self._config,
                self._device.platform,
                meshes,
                incompressible=self._incompressible,
                no_kernels=self._device.no_expert_kernels,
            )
            template = self._with_kept(template, sizes)
            self._formats[sizes] = self._with_experts(template, [tp // ep for tp, ep in sizes])
        return self._formats[sizes]

    def _with_kept(self, template: ModelTemplate, sizes: tuple[tuple[int, int], ...]) -> ModelTemplate:
        """The template with matrices in the checkpoint's format, where these stages can split them."""
        weight_format = replace(template.weight_format, kept=self._choose_kept(template))
        if not weight_format.kept:
            return template
        dropped = frozenset[str]().union(
            *(
                undivided(self._template(tp, weight_format, template.activation_dtype), _mesh(tp), rules_for("decode", ep))
                for tp, ep in sizes
            )
        )
        kept = tuple((name, of_one) for name, of_one in weight_format.kept if name not in dropped)
        return self._template(1, replace(weight_format, kept=kept), template.activation_dtype)

    def _with_experts(self, template: ModelTemplate, num_devices: Sequence[int]) -> tuple[ModelTemplate, tuple[str, ...]]:
        """The template with experts in the checkpoint's format where possible, and their best kernels. `num_devices`:
        over which each expert is split, in each role."""
        matrices = next((leaf for leaf in template.leaves if leaf.is_of_experts), None)
        if matrices is None:
            return template, ()
        sizes = dict(zip(matrices.axes, matrices.shape, strict=True))
        packing = self._choose_packing(template, num_devices) or lossless_packing(template)
        weight_format = replace(template.weight_format, experts=ExpertFormat(packing=packing))
        reason = self._device.no_expert_kernels or moe.unsupported_reason(
            sizes["embed"], sizes["expert_mlp"], max(num_devices), weight_format, template.activation_dtype
        )
        backend: Literal["mosaic_gpu", "xla"] = "xla" if reason else "mosaic_gpu"
        weight_format = replace(weight_format, experts=replace(weight_format.experts, backend=backend))
        note = f"products with experts: {backend} ({reason or 'a kernel made for this device'})"
        return self._template(1, weight_format, template.activation_dtype), (note,)

    def _build(self, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype, num_devices: int) -> ModelTemplate:
        return self._template(num_devices, weight_format, activation_dtype)

    def _template(self, num_devices: int, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> ModelTemplate:
        """The template with the heads of this many devices."""
        key = self.architecture.on_devices(num_devices), weight_format
        if key not in self._templates:
            self._templates[key] = make_template(*key, activation_dtype)
        return self._templates[key]


def _mesh(num_devices: int) -> AbstractMesh:
    return AbstractMesh((num_devices,), (TENSOR,), axis_types=(AxisType.Explicit,))
