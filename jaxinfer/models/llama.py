"""The Llama family (arXiv:2302.13971): RMS norm, rotary embeddings, grouped KV heads, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import ArchitectureConfig, check_activation
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import Attention, AttentionBackend, AttentionParams, LayerAttention
from jaxinfer.layers.embedding import Embedding
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import CosSin, angles, inverse_frequencies, rotated_amplitude
from jaxinfer.models.base import run_blocks
from jaxinfer.weights.formats.weight_format import ModelWeightFormat


class LlamaBlock(nnx.Module):
    """`mlp`: replaces the gated MLP. `normalises_heads`: RMS norm on each head of queries and keys. `has_out_bias`:
    whether the output projection has a bias where the others of attention do."""

    def __init__(
        self,
        config: ArchitectureConfig,
        layer: int,
        weight_format: ModelWeightFormat,
        *,
        mlp: nnx.Module | None = None,
        normalises_heads: bool = False,
        has_out_bias: bool = True,
    ) -> None:
        size = config.hidden_size
        self.attention_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.attention = Attention(
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            weight_format,
            use_bias=config.attention_bias,
            params=AttentionParams(config.head_size**-0.5, config.layer_spans[layer]),
            norm_epsilon=config.rms_norm_eps if normalises_heads else None,
            has_out_bias=has_out_bias,
        )
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps, weight_format)
        self.mlp = mlp or GatedMLP(size, config.mlp_size, weight_format, use_bias=config.mlp_bias)

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: LayerAttention) -> tuple[Float[Array, "T D"], Pages]:
        attended, pages = self.attention(self.attention_norm(x), cos_sin, pages, attend)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pages


class Llama(nnx.Module):
    block: ClassVar[type[Any]] = LlamaBlock  # called with the configuration, the layer's number, the weight format
    weight_map = WeightMap(
        {
            "embedding.table": Weight(("model.embed_tokens.weight",)),
            "head.table": Weight(("lm_head.weight",)),
            "norm.scale": Weight(("model.norm.weight",)),
            "blocks.{layer}.attention_norm.scale": Weight(("model.layers.{layer}.input_layernorm.weight",)),
            "blocks.{layer}.mlp_norm.scale": Weight(("model.layers.{layer}.post_attention_layernorm.weight",)),
            **{
                f"blocks.{{layer}}.{ours}.{kind}": Weight(
                    tuple(f"model.layers.{{layer}}.{name}.{kind_theirs}" for name in theirs), transpose=kind == "kernel", axis=-2
                )
                for ours, theirs in (
                    ("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                    ("attention.out", ("self_attn.o_proj",)),
                    ("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj")),
                    ("mlp.down", ("mlp.down_proj",)),
                )
                for kind, kind_theirs in (("kernel", "weight"), ("bias", "bias"))
            },
        },
        ignored=("lm_head.weight",),  # some checkpoints with tied embeddings store it too
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        check_activation(config)
        return ArchitectureConfig.from_hf(config)

    def __init__(self, config: ArchitectureConfig, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None:
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, weight_format, activation_dtype)
        self.blocks = nnx.List([self.block(config, layer, weight_format) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, weight_format)
        self.head = (
            None if config.tie_word_embeddings else Embedding(config.vocab_size, config.hidden_size, weight_format, activation_dtype)
        )

    def embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.embedding(token_ids)

    def run(
        self, x: Float[Array, "T D"], positions: Int[Array, " T"], pages: Pages, attend: AttentionBackend, layers: range
    ) -> tuple[Float[Array, "T D"], Pages]:
        scaling = self.config.rope_scaling
        frequencies = inverse_frequencies(self.config.head_size, self.config.rope_theta, scaling)
        cos_sin = angles(positions, frequencies, rotated_amplitude(scaling))
        return run_blocks(self.blocks, layers, x, pages, attend, lambda block, x, pages, attend: block(x, cos_sin, pages, attend))

    def finish(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.norm(x)

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        return (self.head or self.embedding).logits(hidden)

    def best(self, hidden: Float[Array, "X D"]) -> Int[Array, " X"]:
        return (self.head or self.embedding).best(hidden)
