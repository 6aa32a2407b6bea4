"""OLMo 2 (arXiv:2501.00656): Llama with norms after attention and MLP instead of before; query and key norms span all
heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import Attention, AttentionParams, LayerAttention
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import CosSin
from jaxinfer.models.llama import Llama
from jaxinfer.weights.formats.weight_format import ModelWeightFormat


class Olmo2Block(nnx.Module):
    def __init__(self, config: ArchitectureConfig, layer: int, weight_format: ModelWeightFormat) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.attention = Attention(
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            weight_format,
            use_bias=config.attention_bias,
            params=AttentionParams(config.head_size**-0.5, config.layer_spans[layer]),
            norm_epsilon=epsilon,
            norms_heads_as_one=True,
            heads=config.heads,
        )
        self.attended_norm = RMSNorm(size, epsilon, weight_format)
        self.mlp = GatedMLP(size, config.mlp_size, weight_format, use_bias=False)
        self.mlp_out_norm = RMSNorm(size, epsilon, weight_format)

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: LayerAttention) -> tuple[Float[Array, "T D"], Pages]:
        attended, pages = self.attention(x, cos_sin, pages, attend)
        x = x + self.attended_norm(attended)
        return x + self.mlp_out_norm(self.mlp(x)), pages


class Olmo2(Llama):
    block = Olmo2Block
    weight_map = WeightMap(
        {
            **Llama.weight_map.weights,
            **{
                f"blocks.{{layer}}.{ours}.scale": Weight((f"model.layers.{{layer}}.{theirs}.weight",))
                for ours, theirs in (
                    ("attention.q_norm", "self_attn.q_norm"),
                    ("attention.k_norm", "self_attn.k_norm"),
                    ("attended_norm", "post_attention_layernorm"),
                    ("mlp_out_norm", "post_feedforward_layernorm"),
                )
            },
        },
        ignored=Llama.weight_map.ignored,
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        return super().read_config({"rms_norm_eps": 1e-5, **config})
