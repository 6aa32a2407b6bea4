"""Token embedding, and the output head that may share its weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.argmax import argmax_of_columns
from jaxinfer.layers.linear import weight


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, size: int, dtype: jnp.dtype) -> None:
        self.table = weight((vocab_size, size), ("vocab", "embed"), dtype)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.table[...].at[token_ids].get(mode="clip", out_sharding=PartitionSpec())

    def logits(self, x: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Scores over the vocabulary, float32, whole on every device."""
        scores = jnp.einsum("xd,vd->xv", x, self.table[...], preferred_element_type=jnp.float32)
        return jax.sharding.reshard(scores, PartitionSpec())

    def best(self, x: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The token of the highest score for each row. With the table as the left operand, whose rows XLA on CPU streams a quarter
        faster than it does as the right one; for this alone the scores may come out the other way round."""
        scores = jnp.matmul(self.table[...], x.T, preferred_element_type=jnp.float32)
        return argmax_of_columns(jax.sharding.reshard(scores, PartitionSpec()))
