"""BERT as a text encoder (arXiv:1810.04805): learned positions, bidirectional attention, layer norm after each sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.encoder_config import EncoderConfig
from jaxinfer.layers.attention import Attention
from jaxinfer.layers.embedding import Embedding
from jaxinfer.layers.matrices import weight
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.weights.formats.weight_format import ModelWeightFormat

# From queries, keys and values [T N H] to attention outputs, within each token's own text.
AttendWithin = Callable[[Array, Array, Array], Float[Array, "T N H"]]


class BertBlock(nnx.Module):
    def __init__(self, config: EncoderConfig, weight_format: ModelWeightFormat) -> None:
        size, heads = config.hidden_size, config.num_heads
        self.attention = Attention(size, heads, heads, size // heads, weight_format, use_bias=True)
        self.attention_norm = LayerNorm(size, config.layer_norm_eps, weight_format)
        self.mlp = MLP(size, config.mlp_size, weight_format, use_bias=True)
        self.mlp_norm = LayerNorm(size, config.layer_norm_eps, weight_format)

    def __call__(self, x: Float[Array, "T D"], attend: AttendWithin) -> Float[Array, "T D"]:
        x = self.attention_norm(x + self.attention.out(attend(*self.attention.project(x))))
        return self.mlp_norm(x + self.mlp(x))


class Bert(nnx.Module):
    weight_map = WeightMap(
        {
            "embedding.table": Weight(("embeddings.word_embeddings.weight",)),
            "positions": Weight(("embeddings.position_embeddings.weight",)),
            "token_types": Weight(("embeddings.token_type_embeddings.weight",)),
            "embedding_norm.scale": Weight(("embeddings.LayerNorm.weight",)),
            "embedding_norm.bias": Weight(("embeddings.LayerNorm.bias",)),
            **{
                f"blocks.{{layer}}.{ours}.{kind}": Weight(
                    tuple(f"encoder.layer.{{layer}}.{name}.{kind_theirs}" for name in theirs), transpose=kind == "kernel", axis=-2
                )
                for ours, theirs, kind_of_weight in (
                    ("attention.qkv", ("attention.self.query", "attention.self.key", "attention.self.value"), "kernel"),
                    ("attention.out", ("attention.output.dense",), "kernel"),
                    ("attention_norm", ("attention.output.LayerNorm",), "scale"),
                    ("mlp.up", ("intermediate.dense",), "kernel"),
                    ("mlp.down", ("output.dense",), "kernel"),
                    ("mlp_norm", ("output.LayerNorm",), "scale"),
                )
                for kind, kind_theirs in ((kind_of_weight, "weight"), ("bias", "bias"))
            },
        },
        ignored=("pooler.*", "embeddings.position_ids"),  # the pooler is for classification
    )

    def __init__(self, config: EncoderConfig, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None:
        size = config.hidden_size
        self.embedding = Embedding(config.vocab_size, size, weight_format, activation_dtype)
        self.positions = weight((config.max_position_embeddings, size), (None, "embed"), weight_format.vector_dtype)
        self.token_types = weight((config.num_token_types, size), (None, "embed"), weight_format.vector_dtype)
        self.embedding_norm = LayerNorm(size, config.layer_norm_eps, weight_format)
        self.blocks = nnx.List([BertBlock(config, weight_format) for _ in range(config.num_layers)])

    def __call__(self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], attend: AttendWithin) -> Float[Array, "T D"]:
        """Hidden states of packed tokens, all of the first type; `positions` are within their texts."""
        x = self.embedding(token_ids)
        of_position = self.positions[...].at[positions].get(mode="clip", out_sharding=PartitionSpec())
        x = self.embedding_norm(x + of_position.astype(x.dtype) + self.token_types[0].astype(x.dtype))

        # Blocks of one structure are traced once, as in `run_blocks`.
        @partial(jax.jit, static_argnums=0)
        def run(graph: nnx.GraphDef, state: nnx.State, x: Array) -> Array:
            return nnx.merge(graph, state)(x, attend)

        for block in self.blocks:
            x = run(*nnx.split(block), x)
        return x
