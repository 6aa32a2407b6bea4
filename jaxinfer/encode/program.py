"""The encode program: a pure function from weights and a batch of texts to embeddings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from jaxinfer.encode.batch import EncodeBatch, most_texts
from jaxinfer.models.bert import AttendWithin, Bert
from jaxinfer.weights.template import Template, Weights
from sharding.mesh import TENSOR

EncodeStep = Callable[[Weights, EncodeBatch], Array]


def encode_step(template: Template[Bert], mesh: Mesh, *, normalizes: bool) -> EncodeStep:
    """The program of a model on a mesh: a float32 row for each text that fits into the batch."""

    def step(weights: Weights, batch: EncodeBatch) -> Float[Array, "S D"]:
        model = template.merge(weights)
        same_text = batch.texts[:, :, None] == batch.texts[:, None, :]
        hidden = model(batch.token_ids.reshape(-1), batch.positions.reshape(-1), _attend_within(mesh, same_text))
        texts = jnp.arange(most_texts(*batch.token_ids.shape))
        shares = jnp.where(batch.texts.reshape(-1) == texts[:, None], batch.shares.reshape(-1), 0.0)
        embeddings = shares @ hidden.astype(jnp.float32)
        if normalizes:
            length = jnp.sqrt(jnp.sum(embeddings * embeddings, axis=-1, keepdims=True))
            embeddings = embeddings / jnp.maximum(length, 1e-12)
        return embeddings

    return step


def _attend_within(mesh: Mesh, same_text: Bool[Array, "R W W"]) -> AttendWithin:
    heads = PartitionSpec(None, TENSOR)
    over_heads = jax.shard_map(_attend, mesh=mesh, in_specs=(heads, heads, heads, PartitionSpec()), out_specs=heads, check_vma=False)
    return lambda q, k, v: over_heads(q, k, v, same_text)


def _attend(
    q: Float[Array, "T N H"], k: Float[Array, "T N H"], v: Float[Array, "T N H"], same_text: Bool[Array, "R W W"]
) -> Float[Array, "T N H"]:
    """Each token attends to its own text, in float32."""
    num_rows, width, _ = same_text.shape

    def by_head(x: Float[Array, "T N H"]) -> Float[Array, "R N W H"]:
        return x.astype(jnp.float32).reshape(num_rows, width, *x.shape[1:]).transpose(0, 2, 1, 3)

    # Batched products on explicitly transposed arrays: on CPU, XLA's own choice is a quarter slower.
    scores = (by_head(q) * q.shape[-1] ** -0.5) @ by_head(k).transpose(0, 1, 3, 2)
    scores = jnp.where(same_text[:, None], scores, -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    attended = (weights @ by_head(v)) / weights.sum(-1, keepdims=True)
    return attended.transpose(0, 2, 1, 3).reshape(q.shape).astype(q.dtype)
