"""Llama 4: experts in all layers or every second one. Layers with RoPE attend within chunks; the others have no
positions and full attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import (
    ArchitectureConfig,
    Routing,
    UnsupportedModelError,
    check_activation,
    integer,
    positive,
    read_spans,
    text_config,
)
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import Attention, AttentionBackend, AttentionParams, LayerAttention
from jaxinfer.layers.deferred_collectives import axis_of_tokens
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import MixtureOfExperts
from jaxinfer.layers.norm import RMSNorm, inverse_rms
from jaxinfer.layers.rope import CosSin, angles, inverse_frequencies, rotate, rotated_amplitude
from jaxinfer.models.base import run_blocks
from jaxinfer.models.llama import Llama
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.span import FULL_ATTENTION, Span

_MLP = "model.layers.{layer}.feed_forward."


@dataclass(frozen=True, slots=True)
class Llama4Config:
    is_rotated: tuple[bool, ...]  # whether a layer has RoPE
    has_experts: tuple[bool, ...]  # whether a layer has experts
    routing: Routing
    expert_size: int  # MLP width of an expert, and of the shared expert
    normalises: bool  # whether layers with RoPE normalise queries and keys
    tempering: tuple[float, float] | None  # of scores in the other layers: tokens between steps, growth


class Llama4Block(nnx.Module):
    def __init__(self, config: ArchitectureConfig, layer: int, weight_format: ModelWeightFormat) -> None:
        family, size = config.family, config.hidden_size
        self.is_rotated = family.is_rotated[layer]
        self.is_tempered = family.tempering is not None and not self.is_rotated
        self.epsilon = config.rms_norm_eps if family.normalises and self.is_rotated else None
        self.attention_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.attention = Attention(
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            weight_format,
            use_bias=config.attention_bias,
            params=AttentionParams(config.head_size**-0.5, config.layer_spans[layer]),
        )
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.mlp = (
            MixtureOfExperts(size, family.expert_size, family.routing, weight_format, shared_size=family.expert_size)
            if family.has_experts[layer]
            else GatedMLP(size, config.mlp_size, weight_format, use_bias=False)
        )

    def __call__(
        self, x: Float[Array, "T D"], cos_sin: CosSin, temper: Float[Array, " T"], pages: Pages, attend: LayerAttention
    ) -> tuple[Float[Array, "T D"], Pages]:
        q, k, v = self.attention.project(self.attention_norm(x))
        if self.is_rotated:
            q, k = rotate(q, cos_sin, interleaved=True), rotate(k, cos_sin, interleaved=True)
        if self.epsilon is not None:
            q, k = _normalised(q, self.epsilon), _normalised(k, self.epsilon)
        if self.is_tempered:
            q = (q.astype(jnp.float32) * temper[:, None, None]).astype(q.dtype)
        attended, pages = attend(q, k, v, pages, self.attention.params)
        x = x + self.attention.out(attended, axis_of_tokens(x))
        return x + self.mlp(self.mlp_norm(x)), pages


class Llama4(Llama):
    block = Llama4Block
    weight_map = WeightMap(
        {
            **{path: found for path, found in Llama.weight_map.weights.items() if ".mlp." not in path},
            **{
                f"blocks.{{layer}}.mlp.{ours}.kernel": Weight(
                    tuple(f"{_MLP}{name}_proj.weight" for name in theirs), transpose=True, axis=-2
                )
                for ours, theirs in (
                    ("gate_up", ("gate", "up")),
                    ("down", ("down",)),
                    ("shared.gate_up", ("shared_expert.gate", "shared_expert.up")),
                    ("shared.down", ("shared_expert.down",)),
                )
            },
            "blocks.{layer}.mlp.router.kernel": Weight((_MLP + "router.weight",), transpose=True),
            "blocks.{layer}.mlp.experts.gate_up": Weight((_MLP + "experts.gate_up_proj",)),
            "blocks.{layer}.mlp.experts.down": Weight((_MLP + "experts.down_proj",)),
        },
        ignored=Llama.weight_map.ignored,
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        check_activation(config)
        read = ArchitectureConfig.from_hf(config)
        layers, expert_size = range(read.num_layers), integer(config, "intermediate_size")
        interval = integer(config, "no_rope_layer_interval", 4)
        # In spite of its name, 1 in no_rope_layers means RoPE.
        rotates = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in layers]
        if len(rotates) != read.num_layers or any(value not in (0, 1) for value in rotates):
            raise UnsupportedModelError(f"no_rope_layers is {rotates!r}: it must be 0 or 1 for each of {read.num_layers} layers")
        with_experts = config.get("moe_layers")
        if with_experts is None:
            step = integer(config, "interleave_moe_layer_step", 1)
            with_experts = list(layers[step - 1 :: step])
        if not isinstance(with_experts, list) or not set(with_experts) <= set(layers):
            raise UnsupportedModelError(f"moe_layers is {with_experts!r}: it must list layers, of {read.num_layers}")
        chunk = None if config.get("attention_chunk_size") is None else integer(config, "attention_chunk_size")
        spans = read_spans(
            config,
            read.num_layers,
            {"full_attention": FULL_ATTENTION, "chunked_attention": Span(chunk=chunk)},
            ["chunked_attention" if rotated else "full_attention" for rotated in rotates],
        )
        family = Llama4Config(
            is_rotated=tuple(map(bool, rotates)),
            has_experts=tuple(layer in with_experts for layer in layers),
            routing=_routing(config),
            expert_size=expert_size,
            normalises=bool(config.get("use_qk_norm", True)),
            tempering=(positive(config, "floor_scale", 8192), positive(config, "attn_scale", 0.1))
            if config.get("attn_temperature_tuning", True)
            else None,
        )
        return replace(read, mlp_size=integer(config, "intermediate_size_mlp", expert_size), spans=spans, family=family)

    def run(
        self, x: Float[Array, "T D"], positions: Int[Array, " T"], pages: Pages, attend: AttentionBackend, layers: range
    ) -> tuple[Float[Array, "T D"], Pages]:
        config = self.config
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        cos_sin = angles(positions, frequencies, rotated_amplitude(config.rope_scaling))
        temper = _temper(positions, *(config.family.tempering or (1.0, 0.0)))
        return run_blocks(
            self.blocks,
            layers,
            x,
            pages,
            attend,
            lambda block, x, pages, attend: block(x, cos_sin, temper, pages, attend),
        )


class Llama4WithImages(Llama4):
    """The text model of a multimodal Llama 4."""

    weight_map = replace(
        Llama4.weight_map,
        ignored=(*Llama4.weight_map.ignored, "vision_model.*", "multi_modal_projector.*"),
        renamed=(("language_model.", ""),),
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        return super().read_config(text_config(config))


def _temper(positions: Int[Array, " T"], floor: float, growth: float) -> Float[Array, " T"]:
    """Temperature by position, which keeps attention sharp over long contexts (arXiv:2501.19399)."""
    return jnp.log1p(jnp.floor((positions.astype(jnp.float32) + 1) / floor)) * growth + 1


def _normalised(x: Float[Array, "T N H"], epsilon: float) -> Float[Array, "T N H"]:
    wide = x.astype(jnp.float32)
    return (wide * inverse_rms(wide, epsilon)).astype(x.dtype)


def _routing(config: Mapping[str, Any]) -> Routing:
    num_experts, top_k = integer(config, "num_local_experts"), integer(config, "num_experts_per_tok", 1)
    if top_k > num_experts:
        raise UnsupportedModelError(f"num_experts_per_tok is {top_k}: num_local_experts is {num_experts}")
    return Routing(num_experts, top_k, "sigmoid", scales_input=True)
