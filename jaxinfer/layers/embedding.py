"""Token embedding, and the output head that may share its weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.argmax import argmax_of_columns, argmax_of_rows
from jaxinfer.layers.matrices import add_matrix
from jaxinfer.layers.vocabulary import VocabShard, shard_over_vocab, split_axis
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat

_FLOAT32 = Plain(jnp.dtype("float32"))


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, size: int, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None:
        self.activation_dtype = activation_dtype
        self.matrix = add_matrix(self, "table", {"vocab": vocab_size}, {"embed": size}, weight_format, inputs_first=False)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Rows of the table. A table split over devices costs one all-reduce of [T, D]."""
        arrays = self.matrix.arrays(self)
        along, dimension, _ = self.matrix.weight_format.outputs_of(arrays)
        return shard_over_vocab(self._rows, along, dimension, arrays, token_ids)

    def _rows(self, shard: VocabShard, arrays: list[Any], token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """On one device: rows of its own part of the vocabulary, zeros for other tokens."""
        _, _, size = self.matrix.weight_format.outputs_of(arrays)
        places, whole = shard.places(token_ids, size), PartitionSpec() if shard.is_whole else None
        rows = self.matrix.weight_format.rows(arrays, places, whole, self.activation_dtype)
        return rows if shard.axis is None else jax.lax.psum(jnp.where(places[:, None] < size, rows, 0), shard.axis)

    def logits(self, x: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """float32 logits; a vocabulary split over devices stays split."""
        scores = self.matrix.product(self, x.astype(jnp.float32))
        return scores if split_axis(scores, 1) else jax.sharding.reshard(scores, PartitionSpec())

    def best(self, x: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The token with the highest logit of each row."""
        if self.matrix.weight_format != _FLOAT32:
            return argmax_of_rows(self.logits(x))
        # The table as the left operand: XLA on CPU streams its rows a quarter faster than from the right. Only here, as
        # argmax alone allows transposed logits.
        scores = jnp.matmul(self.matrix.arrays(self)[0], x.T)
        return argmax_of_columns(scores if split_axis(scores, 0) else jax.sharding.reshard(scores, PartitionSpec()))
