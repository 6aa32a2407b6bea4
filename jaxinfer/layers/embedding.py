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
from jaxinfer.layers.vocabulary import VocabShard, shard_over_vocab, split_axis
from pallas_kernels.packed_matmul.layout import LANES


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, size: int, form: MatrixFormat, activation_dtype: jnp.dtype) -> None:
        self.activation_dtype = activation_dtype
        self.table = matrix({"vocab": vocab_size}, {"embed": size}, form, inputs_first=False)
        self.table_scale = weight((vocab_size,), ("vocab",), form.vector_dtype) if form.is_int8 else None

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """A table that is split over devices costs one sum of [T, D] over the mesh."""
        table, scale = self.table.get_value(), None if self.table_scale is None else self.table_scale[...]
        along = (table.stack, 1) if isinstance(table, InStack) else (table, 0)
        return shard_over_vocab(self._rows, *along, table, scale, token_ids)

    def _rows(self, shard: VocabShard, table: Array | InStack, scale: Array | None, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Each device gives those of its own part, and zeros for others."""
        size = table.stack.shape[1] * LANES if isinstance(table, InStack) else len(table)
        places, whole = shard.places(token_ids, size), PartitionSpec() if shard.is_whole else None
        if isinstance(table, InStack):
            rows = packed.rows(table, places, whole)
        else:
            rows = table.at[places].get(mode="clip", out_sharding=whole)
        rows = rows.astype(self.activation_dtype)
        if scale is not None:
            rows = rows * scale.at[places].get(mode="clip", out_sharding=whole)[:, None].astype(rows.dtype)
        return rows if shard.axis is None else jax.lax.psum(jnp.where(places[:, None] < size, rows, 0), shard.axis)

    def logits(self, x: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Scores over the vocabulary, float32; of several devices each has those of its part."""
        wide, table = x.astype(jnp.float32), self.table.get_value()
        scale = None if self.table_scale is None else self.table_scale[...]
        if isinstance(table, InStack):
            scores = packed.product(wide, table, scale, output_axes=1)
        elif scale is None:
            scores = product(wide, table, equation="ti,oi->to")
        else:
            scores = int8.product(wide, table, scale)
        return scores if split_axis(scores, 1) else jax.sharding.reshard(scores, PartitionSpec())

    def best(self, x: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The token of the highest score for each row."""
        table = self.table.get_value()
        if isinstance(table, InStack) or table.dtype != jnp.float32:
            return argmax_of_rows(self.logits(x))
        # With the table as the left operand, whose rows XLA on CPU streams a quarter faster than it does as the right one; for this
        # alone the scores may come out the other way round.
        scores = jnp.matmul(table, x.T)
        return argmax_of_columns(scores if split_axis(scores, 0) else jax.sharding.reshard(scores, PartitionSpec()))
