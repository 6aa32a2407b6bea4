"""Gemma 3 (arXiv:2503.19786), the text model: norms before and after attention and MLP; most layers have a sliding
window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import (
    AnyRopeScaling,
    ArchitectureConfig,
    UnsupportedModelError,
    check_activation,
    integer,
    positive,
    read_rope,
    read_spans,
    text_config,
)
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.argmax import argmax_of_rows
from jaxinfer.layers.attention import Attention, AttentionBackend, AttentionParams, LayerAttention
from jaxinfer.layers.embedding import Embedding
from jaxinfer.layers.mlp import GatedMLP, gelu_tanh
from jaxinfer.layers.norm import OffsetRMSNorm
from jaxinfer.layers.rope import CosSin, angles, inverse_frequencies, rotated_amplitude
from jaxinfer.models.base import run_blocks
from jaxinfer.models.llama import Llama
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.span import FULL_ATTENTION, Span

# Defaults of fields that published configurations leave out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Gemma3Settings:
    query_scalar: float  # scores are divided by its square root
    local_rope: tuple[float, AnyRopeScaling]  # theta and scaling of layers with a window
    final_soft_cap: float | None  # of logits


class Gemma3Block(nnx.Module):
    def __init__(self, config: ArchitectureConfig, layer: int, weight_format: ModelWeightFormat) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        span = config.layer_spans[layer]
        self.is_local = span != FULL_ATTENTION
        self.attention_norm = OffsetRMSNorm(size, epsilon, weight_format)
        self.attention = Attention(
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            weight_format,
            use_bias=config.attention_bias,
            params=AttentionParams(config.family.query_scalar**-0.5, span, config.soft_cap),
            norm_epsilon=epsilon,
            norm=OffsetRMSNorm,
        )
        self.attended_norm = OffsetRMSNorm(size, epsilon, weight_format)
        self.mlp_norm = OffsetRMSNorm(size, epsilon, weight_format)
        self.mlp = GatedMLP(size, config.mlp_size, weight_format, use_bias=False, activation=gelu_tanh)
        self.mlp_out_norm = OffsetRMSNorm(size, epsilon, weight_format)

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: LayerAttention) -> tuple[Float[Array, "T D"], Pages]:
        attended, pages = self.attention(self.attention_norm(x), cos_sin, pages, attend)
        x = x + self.attended_norm(attended)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), pages


class Gemma3(nnx.Module):
    weight_map = WeightMap(
        {
            **Llama.weight_map.weights,
            **{
                f"blocks.{{layer}}.{ours}.scale": Weight((f"model.layers.{{layer}}.{theirs}.weight",))
                for ours, theirs in (
                    ("attention.q_norm", "self_attn.q_norm"),
                    ("attention.k_norm", "self_attn.k_norm"),
                    ("attended_norm", "post_attention_layernorm"),
                    ("mlp_norm", "pre_feedforward_layernorm"),
                    ("mlp_out_norm", "post_feedforward_layernorm"),
                )
            },
        },
        ignored=("lm_head.weight", "*vision_tower.*", "*multi_modal_projector.*"),
        # Names inside the multimodal model, as first published and as transformers saves it now.
        renamed=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("model.language_model.", "model.")),
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`. A multimodal model's is its `text_config`."""
        text = _DEFAULTS | dict(text_config(config) if "text_config" in config else config)
        text["tie_word_embeddings"] = config.get("tie_word_embeddings", text["tie_word_embeddings"])
        check_activation(text, ("gelu_pytorch_tanh",), "hidden_activation")
        if text.get("use_bidirectional_attention"):
            raise UnsupportedModelError("use_bidirectional_attention is True: supported is False, attention to what came before")
        read = ArchitectureConfig.from_hf(text)
        window = None if text["sliding_window"] is None else Span(window=integer(text, "sliding_window"))
        kinds = {"full_attention": FULL_ATTENTION} | ({"sliding_attention": window} if window else {})
        pattern = integer(text, "sliding_window_pattern", 6)
        default = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(read.num_layers)]
        theta, scaling, local_rope = _read_ropes(text)
        caps = [
            None if text.get(key) is None else positive(text, key, None) for key in ("attn_logit_softcapping", "final_logit_softcapping")
        ]
        return replace(
            read,
            rope_theta=theta,
            rope_scaling=scaling,
            spans=read_spans(text, read.num_layers, kinds, default),
            soft_cap=caps[0],
            family=Gemma3Settings(positive(text, "query_pre_attn_scalar", 256.0), local_rope, caps[1]),
        )

    def __init__(self, config: ArchitectureConfig, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None:
        size = config.hidden_size
        self.config = config
        self.embedding = Embedding(config.vocab_size, size, weight_format, activation_dtype)
        # Rounded to the weights' type, as in training.
        self.embedding_scale = float(jnp.dtype(weight_format.vector_dtype).type(size**0.5))
        self.blocks = nnx.List([Gemma3Block(config, layer, weight_format) for layer in range(config.num_layers)])
        self.norm = OffsetRMSNorm(size, config.rms_norm_eps, weight_format)
        self.head = None if config.tie_word_embeddings else Embedding(config.vocab_size, size, weight_format, activation_dtype)

    def embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.embedding(token_ids) * self.embedding_scale

    def run(
        self, x: Float[Array, "T D"], positions: Int[Array, " T"], pages: Pages, attend: AttentionBackend, layers: range
    ) -> tuple[Float[Array, "T D"], Pages]:
        config = self.config
        of_global, of_local = (
            angles(positions, inverse_frequencies(config.head_size, theta, scaling), rotated_amplitude(scaling))
            for theta, scaling in ((config.rope_theta, config.rope_scaling), config.family.local_rope)
        )
        return run_blocks(
            self.blocks,
            layers,
            x,
            pages,
            attend,
            lambda block, x, pages, attend: block(x, of_local if block.is_local else of_global, pages, attend),
        )

    def finish(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.norm(x)

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        scores, cap = (self.head or self.embedding).logits(hidden), self.config.family.final_soft_cap
        return scores if cap is None else jnp.tanh(scores / cap) * cap

    def best(self, hidden: Float[Array, "X D"]) -> Int[Array, " X"]:
        if self.config.family.final_soft_cap is not None:
            return argmax_of_rows(self.logits(hidden))  # the cap can make logits equal: ties as in `logits`
        return (self.head or self.embedding).best(hidden)


def _read_ropes(text: Mapping[str, Any]) -> tuple[float, AnyRopeScaling, tuple[float, AnyRopeScaling]]:
    """(theta, scaling, local rope), the first two of global layers. transformers 5 has both in `rope_parameters`."""
    both = text.get("rope_parameters")
    if both is None:
        older = {"rope_theta": text.get("rope_local_base_freq", 10_000.0)}
        return *read_rope(text, default_theta=1e6), read_rope(text, older)
    if not isinstance(both, Mapping) or not {"full_attention", "sliding_attention"} <= both.keys():
        raise UnsupportedModelError(f"rope_parameters is {both!r}: it must have full_attention and sliding_attention")
    return *read_rope(text, both["full_attention"], 1e6), read_rope(text, both["sliding_attention"], 1e4)
