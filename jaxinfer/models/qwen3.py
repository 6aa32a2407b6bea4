"""Qwen3 (arXiv:2505.09388): Llama with normalised queries and keys; larger models have mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import ArchitectureConfig, Routing, UnsupportedModelError, integer
from jaxinfer.layers.moe import MixtureOfExperts
from jaxinfer.models.llama import Llama, LlamaBlock
from jaxinfer.models.qwen2 import window_of, with_windows
from jaxinfer.weights.formats.weight_format import ModelWeightFormat


@dataclass(frozen=True, slots=True)
class Qwen3Experts:
    routing: Routing
    inner_size: int
    layers: tuple[int, ...]  # with experts; the others are dense


class Qwen3Block(LlamaBlock):
    def __init__(self, config: ArchitectureConfig, layer: int, weight_format: ModelWeightFormat) -> None:
        experts, mlp = config.family, None
        if experts is not None and layer in experts.layers:
            mlp = MixtureOfExperts(config.hidden_size, experts.inner_size, experts.routing, weight_format)
        super().__init__(config, layer, weight_format, mlp=mlp, normalises_heads=True)


class Qwen3(Llama):
    block = Qwen3Block
    weight_map = WeightMap(
        {
            **Llama.weight_map.weights,
            **{
                f"blocks.{{layer}}.attention.{part}_norm.scale": Weight((f"model.layers.{{layer}}.self_attn.{part}_norm.weight",))
                for part in ("q", "k")
            },
        },
        ignored=Llama.weight_map.ignored,
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        return with_windows(super().read_config(config), config)


class Qwen3Moe(Qwen3):
    weight_map = WeightMap(
        {
            **Qwen3.weight_map.weights,
            "blocks.{layer}.mlp.router.kernel": Weight(("model.layers.{layer}.mlp.gate.weight",), transpose=True),
            "blocks.{layer}.mlp.experts.gate_up": Weight(
                tuple(f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")),
                transpose=True,
                axis=-2,
            ),
            "blocks.{layer}.mlp.experts.down": Weight(
                ("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",),
                transpose=True,
            ),
        },
        ignored=Qwen3.weight_map.ignored,
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`. All layers have the same span."""
        read = Llama.read_config(config)
        # transformers 5 writes num_local_experts.
        num_experts = integer(config, "num_local_experts" if "num_experts" not in config else "num_experts")
        top_k, step = integer(config, "num_experts_per_tok", 8), integer(config, "decoder_sparse_step", 1)
        if top_k > num_experts:
            raise UnsupportedModelError(f"num_experts_per_tok is {top_k}: there are {num_experts} experts")
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise UnsupportedModelError(f"mlp_only_layers is {dense!r}: it must be a list of layers' numbers, or null")
        experts = Qwen3Experts(
            Routing(num_experts, top_k, "softmax", normalises=bool(config.get("norm_topk_prob", False))),
            integer(config, "moe_intermediate_size"),
            tuple(layer for layer in range(read.num_layers) if layer not in dense and (layer + 1) % step == 0),
        )
        return replace(read, spans=(window_of(config),) * read.num_layers, family=experts)
