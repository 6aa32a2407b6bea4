"""A model on a target, from its config.json: placed as an engine there would place it, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.registry import read_config
from jaxinfer.planner.placement import DeviceKind, Layouts, Placement, Placer
from jaxinfer.planner.target import Target
from jaxinfer.weights.expert_packing import published_packing
from sharding.layout import Parallel


class TargetModel:
    """Reads once what does not depend on the layout."""

    def __init__(
        self,
        config: Mapping[str, Any],
        target: Target,
        page_size: int | None = None,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        weights: str = "auto",
    ) -> None:
        """`config`: the keys of a config.json; `dtype`, of weights on a CPU, `kv_dtype` and `weights`: as `jaxinfer
        serve` has them.

        Raises `UnsupportedModelError` for a model that can't be served."""
        self.target = target
        self.architecture = read_config(config)
        quantisation = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
        no_kernels = "its kernels are for NVIDIA GPUs, not cpu" if target.is_cpu else None
        self._placer = Placer(
            self.architecture,
            ModelConfig(dtype=dtype if target.is_cpu else "auto", weights=weights),
            DeviceKind(target.card, "cpu" if target.is_cpu else "gpu", no_kernels),
            partial(published_packing, quantisation.get("quant_method")),
            page_size,
            kv_dtype=kv_dtype,
        )

    def on(self, num_devices: int) -> TargetModel:
        """The same model on another number of the same devices."""
        other = copy(self)
        other.target = replace(self.target, num_devices=num_devices)
        return other

    @cached_property
    def routing(self) -> Any:
        """Of its mixture-of-experts layers; None without any."""
        return getattr(self.architecture.family, "routing", None)

    def place(self, layouts: Layouts) -> Placement:
        """Raises `ConfigError` for layouts that this model can't have; the message names what would work."""
        return self._placer.place(layouts)

    def place_shared(self, layout: Parallel) -> Placement:
        """`place` with both roles in this layout on the same devices. Raises `ConfigError` as it does."""
        return self.place(Layouts(layout, layout, True))
