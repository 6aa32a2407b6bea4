"""Token embedding, and the output head that may share its weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers import int8
from jaxinfer.layers.argmax import argmax_of_columns, argmax_of_rows
from jaxinfer.layers.linear import product, vector_dtype, weight


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, size: int, dtype: jnp.dtype, activation_dtype: jnp.dtype) -> None:
        self.activation_dtype = activation_dtype
        self.table = weight((vocab_size, size), ("vocab", "embed"), dtype)
        self.table_scale = weight((vocab_size,), ("vocab",), vector_dtype(dtype)) if dtype == int8.INT8 else None

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        rows = self.table[...].at[token_ids].get(mode="clip", out_sharding=PartitionSpec()).astype(self.activation_dtype)
        if self.table_scale is None:
            return rows
        return rows * self.table_scale[...].at[token_ids].get(mode="clip", out_sharding=PartitionSpec())[:, None].astype(rows.dtype)

    def logits(self, x: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Scores over the vocabulary, float32, whole on every device."""
        wide = x.astype(jnp.float32)
        if self.table_scale is None:
            scores = product(wide, self.table[...], equation="ti,oi->to")
        else:
            scores = int8.product(wide, self.table[...], self.table_scale[...])
        return jax.sharding.reshard(scores, PartitionSpec())

    def best(self, x: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The token of the highest score for each row."""
        if self.table.dtype != jnp.float32:
            return argmax_of_rows(self.logits(x))
        # With the table as the left operand, whose rows XLA on CPU streams a quarter faster than it does as the right one; for this
        # alone the scores may come out the other way round.
        scores = jnp.matmul(self.table[...], x.T)
        return argmax_of_columns(jax.sharding.reshard(scores, PartitionSpec()))
