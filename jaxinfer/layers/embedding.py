"""Token embedding, and the output head that may share its weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers import int8, packed
from jaxinfer.layers.argmax import argmax_of_columns, argmax_of_rows
from jaxinfer.layers.linear import product
from jaxinfer.layers.matrices import InStack, MatrixFormat, matrix, weight


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, size: int, form: MatrixFormat, activation_dtype: jnp.dtype) -> None:
        self.activation_dtype = activation_dtype
        self.table = matrix({"vocab": vocab_size}, {"embed": size}, form, inputs_first=False)
        self.table_scale = weight((vocab_size,), ("vocab",), form.vector_dtype) if form.is_int8 else None

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        table = self.table.get_value()
        if isinstance(table, InStack):
            rows = packed.rows(table, token_ids)
        else:
            rows = table.at[token_ids].get(mode="clip", out_sharding=PartitionSpec())
        rows = rows.astype(self.activation_dtype)
        if self.table_scale is None:
            return rows
        return rows * self.table_scale[...].at[token_ids].get(mode="clip", out_sharding=PartitionSpec())[:, None].astype(rows.dtype)

    def logits(self, x: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Scores over the vocabulary, float32, whole on every device."""
        wide, table = x.astype(jnp.float32), self.table.get_value()
        scale = None if self.table_scale is None else self.table_scale[...]
        if isinstance(table, InStack):
            scores = packed.product(wide, table, scale, output_axes=1)
        elif scale is None:
            scores = product(wide, table, equation="ti,oi->to")
        else:
            scores = int8.product(wide, table, scale)
        return jax.sharding.reshard(scores, PartitionSpec())

    def best(self, x: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The token of the highest score for each row."""
        table = self.table.get_value()
        if isinstance(table, InStack) or table.dtype != jnp.float32:
            return argmax_of_rows(self.logits(x))
        # With the table as the left operand, whose rows XLA on CPU streams a quarter faster than it does as the right one; for this
        # alone the scores may come out the other way round.
        scores = jnp.matmul(table, x.T)
        return argmax_of_columns(jax.sharding.reshard(scores, PartitionSpec()))
