"""A model as a role's devices have it: what each stage holds, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxinfer.config import ConfigError, ModelConfig
from jaxinfer.dry_run.target import Target
from jaxinfer.kv_cache.spec import LayerGroups, PageSpec, default_page_size
from jaxinfer.layers import moe
from jaxinfer.layers.matrices import ExpertFormat, MatrixFormat
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.models.registry import read_config
from jaxinfer.plan import choose_formats
from jaxinfer.runtime.stage_partition import stage_layers
from jaxinfer.runtime.template import ModelTemplate, make_template
from jaxinfer.runtime.work import ModelWork, model_work
from sharding.hardware import hardware_of
from sharding.layout import Parallel
from sharding.mesh import TENSOR
from sharding.rules import Rules, rules_for

_BFLOAT16 = jnp.dtype("bfloat16")
_QUANTISED: Mapping[Any, Literal["int4", "fp8"]] = {"compressed-tensors": "int4", "fp8": "fp8"}


@dataclass(frozen=True)
class StageShape:
    layers: range
    weight_bytes: int  # on each device
    page_bytes: int  # of its part of a page


@dataclass(frozen=True)
class RoleShape:
    """A model in a layout."""

    layout: Parallel
    template: ModelTemplate  # of the whole model, with the heads of these meshes
    rules: Rules
    work: ModelWork
    stages: tuple[StageShape, ...]
    notes: tuple[str, ...]  # what it costs, and why

    @property
    def architecture(self) -> ArchitectureConfig:
        assert isinstance(self.template.config, ArchitectureConfig)
        return self.template.config


_OnStage = tuple[ModelTemplate, ModelWork, tuple[str, ...]]  # and notes


class Shapes:
    """Of one model on one target, in any layout. What does not depend on the layout is read once."""

    def __init__(self, config: Mapping[str, Any], target: Target, page_size: int | None = None, *, dtype: str = "auto") -> None:
        """`config`: the keys of a config.json; `dtype`: of weights on a CPU, as `jaxinfer serve --dtype` has it. Raises `UnsupportedModelError` for a
        model that can't be served."""
        self.target = target
        self.architecture = read_config(config)
        quantisation = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
        self._packing = _QUANTISED.get(quantisation.get("quant_method")) if not target.is_cpu else None
        self._templates: dict[tuple[ArchitectureConfig, MatrixFormat], ModelTemplate] = {}
        self._on_stages: dict[tuple[int, int], _OnStage | ValueError] = {}
        self.form, self.activation_dtype = MatrixFormat(_BFLOAT16), _BFLOAT16
        if target.is_cpu:
            self.form, self.activation_dtype = choose_formats(ModelConfig(dtype=dtype), "cpu")
        self._page_size = page_size
        self.spec = self._spec((1,))

    def in_layouts(self, *layouts: Parallel) -> Shapes:
        """The same, with pages as an engine has them whose roles are laid out like this."""
        other = copy(self)
        other.spec = self._spec([layout.tp for layout in layouts])
        return other

    def _spec(self, num_devices: Sequence[int]) -> PageSpec:
        page_size = self._page_size or default_page_size(self.architecture, num_devices)
        return PageSpec.of(self.architecture, page_size, self.activation_dtype.itemsize)

    def on(self, num_devices: int) -> Shapes:
        """The same model on another number of the same devices."""
        other = copy(self)
        other.target = replace(self.target, num_devices=num_devices)
        return other

    @cached_property
    def routing(self) -> Any:
        """Of its mixtures of experts; None where it has none."""
        return getattr(self.architecture.family, "routing", None)

    def layout(self, role: str, layout: Parallel, *, is_shared: bool = False) -> RoleShape:
        """`is_shared`: the other role has the same devices. Raises `ConfigError` for axes that a layout doesn't divide, and more stages than layers;
        it names what would do."""
        if layout.ep > 1 and self.routing is None:
            raise ConfigError(f"{role}_parallel is {layout}, but this model has no experts: leave out ep={layout.ep}")
        try:
            template, work, notes = self._on_stage(layout.tp, layout.ep)
            roles = ("prefill", "decode") if is_shared else (role,)
            ranges = stage_layers(work, layout, roles, hardware_of(self.target.card))
        except ValueError as error:
            raise ConfigError(f"{role}_parallel is {layout}: {error}") from error
        groups = LayerGroups.of(self.architecture.layer_spans)
        num_kv_heads = self.architecture.on_devices(layout.tp).num_kv_heads
        stages = tuple(
            StageShape(
                layers,
                work.device_bytes(layers, layout.tp),
                self.spec.on_device(layout.tp, num_kv_heads, groups.of_stage(layers).size).page_bytes,
            )
            for layers in ranges
        )
        latents = self.spec.latents_on(layout.tp)
        notes += () if latents is None else (f"latents: {latents}",)
        return RoleShape(layout, template, rules_for(role, layout.ep), work, stages, notes)

    def _on_stage(self, tp: int, ep: int) -> _OnStage:
        """Of the whole model on as many devices as a stage has. Raises `ValueError` where an axis does not divide."""
        if (tp, ep) not in self._on_stages:
            try:
                self._on_stages[tp, ep] = self._lay_out(tp, ep)
            except ValueError as error:
                self._on_stages[tp, ep] = error
        found = self._on_stages[tp, ep]
        if isinstance(found, ValueError):
            raise found
        return found

    def _lay_out(self, tp: int, ep: int) -> _OnStage:
        rules, own = rules_for("decode", ep), self.architecture.on_devices(tp)
        template, notes = self._with_experts(own, 1 if ep > 1 else tp)
        template.abstract(AbstractMesh((tp,), (TENSOR,), axis_types=(AxisType.Explicit,)), rules)  # type: ignore[arg-type]
        costs = [] if own.heads is None else [own.heads.cost(has_latents=own.latent is not None)]
        return template, model_work(template, rules), (*costs, *notes)

    def _with_experts(self, architecture: ArchitectureConfig, num_parts: int) -> tuple[ModelTemplate, list[str]]:
        """Experts as the published checkpoint has them; `num_parts`: that each is cut into."""
        template = self._template(architecture, self.form)
        experts = next((leaf for leaf in template.leaves if leaf.is_of_experts), None)
        if experts is None or self.target.is_cpu:
            return template, []
        sizes = dict(zip(experts.axes, experts.shape, strict=True))
        packed = replace(self.form, experts=ExpertFormat(packing=self._packing))
        against = moe.unsupported_reason(sizes["embed"], sizes["expert_mlp"], num_parts, packed, self.activation_dtype)
        if self._packing is not None and against is not None:
            packed = self.form
        backend: Literal["mosaic_gpu", "xla"] = "xla" if against else "mosaic_gpu"
        chosen = replace(packed, experts=replace(packed.experts, backend=backend))
        notes = [f"products with experts: {backend}" + (f" ({against})" if against else "")]
        return self._template(architecture, chosen), notes

    def _template(self, architecture: ArchitectureConfig, form: MatrixFormat) -> ModelTemplate:
        if (architecture, form) not in self._templates:
            self._templates[architecture, form] = make_template(architecture, form, self.activation_dtype)
        return self._templates[architecture, form]
