"""DeepSeek-V3 (arXiv:2412.19437) and Kimi K2 (arXiv:2507.20534), of the same structure: multi-head latent attention,
and mixture-of-experts layers after some dense ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import (
    ArchitectureConfig,
    LatentSizes,
    Routing,
    UnsupportedModelError,
    check_activation,
    count,
    integer,
    positive,
    text_config,
)
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import LayerAttention
from jaxinfer.layers.latent_attention import LatentAttention
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import MixtureOfExperts
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import CosSin
from jaxinfer.models.llama import Llama
from jaxinfer.weights.formats.weight_format import ModelWeightFormat

# Other values: the original code supports them, transformers doesn't.
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."


@dataclass(frozen=True, slots=True)
class DeepseekV3Config:
    num_dense_layers: int  # before those with experts
    routing: Routing  # of the layers with experts
    expert_size: int  # MLP width of an expert
    shared_size: int | None  # MLP width of the shared expert
    num_mtp: int  # multi-token prediction modules
    is_interleaved: bool  # whether RoPE pairs adjacent columns


class DeepseekV3Block(nnx.Module):
    def __init__(self, config: ArchitectureConfig, layer: int, weight_format: ModelWeightFormat) -> None:
        family, size = config.family, config.hidden_size
        assert config.latent is not None
        self.attention_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.attention = LatentAttention(
            size,
            config.num_heads,
            config.latent,
            weight_format,
            scaling=config.rope_scaling,
            interleaved=family.is_interleaved,
            use_bias=config.attention_bias,
        )
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.mlp = (
            GatedMLP(size, config.mlp_size, weight_format, use_bias=False)
            if layer < family.num_dense_layers
            else MixtureOfExperts(size, family.expert_size, family.routing, weight_format, shared_size=family.shared_size)
        )

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: LayerAttention) -> tuple[Float[Array, "T D"], Pages]:
        attended, pages = self.attention(self.attention_norm(x), cos_sin, pages, attend)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pages


class NextTokenModule(nnx.Module):
    """Multi-token prediction (MTP): a block over the hidden state of a token joined with the embedding of the next,
    which predicts the one after that. It shares the model's embedding and head. For a future drafter: nothing runs it
    yet, so no device stores its weights."""

    def __init__(self, config: ArchitectureConfig, layer: int, weight_format: ModelWeightFormat) -> None:
        size = config.hidden_size
        self.embedding_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.join = Linear({"embedding_hidden": 2 * size}, {"embed": size}, weight_format)
        self.block = DeepseekV3Block(config, layer, weight_format)
        self.norm = RMSNorm(size, config.rms_norm_eps, weight_format)


def _of_block(block: str) -> dict[str, Weight]:
    """The part of the weight map for a block."""
    attention = {
        f"{block}.attention.{ours}.{kind}": Weight(
            tuple(f"{_LAYER}self_attn.{name}.{kind_theirs}" for name in theirs), transpose=kind == "kernel", axis=-1
        )
        for ours, theirs in (
            ("down", ("q_a_proj", "kv_a_proj_with_mqa")),
            ("query_up", ("q_b_proj",)),
            ("kv_down", ("kv_a_proj_with_mqa",)),
            ("queries", ("q_proj",)),
            ("out", ("o_proj",)),
        )
        for kind, kind_theirs in (("kernel", "weight"), ("bias", "bias"))
    }
    gated = {
        f"{block}.mlp.{ours}": Weight(tuple(f"{theirs}{name}_proj.weight" for name in names), transpose=True, axis=-2)
        for mlp, theirs, kernel in (
            ("", _LAYER + "mlp.", ".kernel"),
            ("shared.", _LAYER + "mlp.shared_experts.", ".kernel"),
            ("experts.", _EXPERT, ""),
        )
        for ours, names in ((f"{mlp}gate_up{kernel}", ("gate", "up")), (f"{mlp}down{kernel}", ("down",)))
    }
    return {
        **attention,
        **gated,
        f"{block}.attention.query_norm.scale": Weight((_LAYER + "self_attn.q_a_layernorm.weight",)),
        f"{block}.attention.norm.scale": Weight((_LAYER + "self_attn.kv_a_layernorm.weight",)),
        f"{block}.attention.up": Weight((_LAYER + "self_attn.kv_b_proj.weight",)),
        f"{block}.mlp.router.kernel": Weight((_LAYER + "mlp.gate.weight",), transpose=True),
        f"{block}.mlp.router.bias": Weight((_LAYER + "mlp.gate.e_score_correction_bias",)),
        f"{block}.attention_norm.scale": Weight((_LAYER + "input_layernorm.weight",)),
        f"{block}.mlp_norm.scale": Weight((_LAYER + "post_attention_layernorm.weight",)),
    }


class DeepseekV3(Llama):
    block = DeepseekV3Block
    weight_map = WeightMap(
        {
            "embedding.table": Weight(("model.embed_tokens.weight",)),
            "head.table": Weight(("lm_head.weight",)),
            "norm.scale": Weight(("model.norm.weight",)),
            **_of_block("blocks.{layer}"),
            **_of_block("mtp.{layer}.block"),
            "mtp.{layer}.embedding_norm.scale": Weight((_LAYER + "enorm.weight",)),
            "mtp.{layer}.hidden_norm.scale": Weight((_LAYER + "hnorm.weight",)),
            "mtp.{layer}.join.kernel": Weight((_LAYER + "eh_proj.weight",), transpose=True),
            "mtp.{layer}.norm.scale": Weight((_LAYER + "shared_head.norm.weight",)),
        },
        # The last two are copies of the model's own: "shares parameters", says DeepSeek's README_WEIGHTS.md.
        ignored=("lm_head.weight", "model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"),
        # transformers leaves out these layers, but not the field.
        optional={"num_nextn_predict_layers": "*.eh_proj.weight"},
        unread=("mtp",),
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        check_activation(config)
        for key, only in _ONLY.items():
            if (value := config.get(key, only)) != only:
                raise UnsupportedModelError(f"{key} is {value!r}: only {only!r} is supported")
        rope_size, has_query_rank = integer(config, "qk_rope_head_dim"), config.get("q_lora_rank") is not None
        if rope_size % 2:
            raise UnsupportedModelError(f"qk_rope_head_dim is {rope_size}: it must be even, for rotary embeddings")
        if config.get("attention_bias") and has_query_rank:
            raise UnsupportedModelError("attention_bias is true: with a q_lora_rank only false is supported")
        latent = LatentSizes(
            integer(config, "q_lora_rank") if has_query_rank else None,
            integer(config, "kv_lora_rank"),
            integer(config, "qk_nope_head_dim"),
            rope_size,
            integer(config, "v_head_dim"),
        )
        expert_size = integer(config, "moe_intermediate_size")
        family = DeepseekV3Config(
            num_dense_layers=count(config, "first_k_dense_replace"),
            routing=_routing(config),
            expert_size=expert_size,
            shared_size=count(config, "n_shared_experts") * expert_size or None,
            num_mtp=count(config, "num_nextn_predict_layers"),
            is_interleaved=bool(config.get("rope_interleave", True)),
        )
        # As in transformers, head_dim is the rotated part, and every head has its own key and value.
        read = ArchitectureConfig.from_hf({**config, "head_dim": rope_size, "num_key_value_heads": None})
        return replace(read, latent=latent, family=family)

    def __init__(self, config: ArchitectureConfig, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None:
        super().__init__(config, weight_format, activation_dtype)
        # By layer number in the checkpoint.
        after = range(config.num_layers, config.num_layers + config.family.num_mtp)
        self.mtp = nnx.Dict({str(layer): NextTokenModule(config, layer, weight_format) for layer in after})


class KimiK25(DeepseekV3):
    """The text model of Kimi K2.5 (arXiv:2602.02276)."""

    weight_map = replace(
        DeepseekV3.weight_map,
        ignored=(*DeepseekV3.weight_map.ignored, "vision_tower.*", "mm_projector.*", "model.mm_projector.*"),
        # The first as transformers 5 saves it.
        renamed=(("language_model.model.blocks.", "model.layers."), ("language_model.", "")),
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        return super().read_config(text_config(config))


def _routing(config: Mapping[str, Any]) -> Routing:
    routing = Routing(
        num_experts=integer(config, "n_routed_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        scoring="sigmoid",
        has_bias=True,
        num_groups=integer(config, "n_group", 1),
        top_groups=integer(config, "topk_group", 1),
        normalises=bool(config.get("norm_topk_prob", True)),
        scale=positive(config, "routed_scaling_factor", 1.0),
    )
    size, rest = divmod(routing.num_experts, routing.num_groups)
    if rest or (routing.num_groups > 1 and size < 2):
        raise UnsupportedModelError(
            f"n_group is {routing.num_groups}: it must divide n_routed_experts ({routing.num_experts}), with 2 or more in each"
        )
    if routing.top_groups > routing.num_groups:
        raise UnsupportedModelError(f"topk_group is {routing.top_groups}: n_group is {routing.num_groups}")
    if routing.top_k > size * routing.top_groups:
        raise UnsupportedModelError(
            f"num_experts_per_tok is {routing.top_k}: topk_group ({routing.top_groups}) of {size} experts have fewer"
        )
    return routing
