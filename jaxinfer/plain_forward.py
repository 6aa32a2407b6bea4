"""The plain forward pass: whole sequence, dense causal attention, no pages, no batch. What the engine is checked against."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.pages import Pages
from jaxinfer.runtime.compilation import Executable, ProgramSource, compile_program
from jaxinfer.runtime.template import ModelTemplate, Weights
from sharding.mesh import TENSOR
from sharding.partition import replicated

_SHORTEST = 32  # tokens; lengths are rounded up to powers of two, so that few programs serve all


class PlainForward:
    """Compiles on first use of a length, and says nothing of it to the engine's count of compilations after ready."""

    def __init__(self, template: ModelTemplate, weights: Weights, mesh: Mesh) -> None:
        self._template = template
        self._weights = weights
        self._mesh = mesh
        self._programs: dict[int, Executable] = {}

    def logits(self, token_ids: list[int]) -> Float[np.ndarray, "T V"]:
        """float32 scores of what follows each token."""
        length = len(token_ids)
        padded_length = max(_SHORTEST, 1 << math.ceil(math.log2(length)))
        padded = np.zeros(padded_length, np.int32)
        padded[:length] = token_ids
        if padded_length not in self._programs:
            tokens = jax.ShapeDtypeStruct(padded.shape, padded.dtype, sharding=replicated(self._mesh))
            abstract = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), self._weights)
            source = ProgramSource(f"plain forward/{padded_length}", self._forward, (abstract, tokens), self._mesh)
            self._programs[padded_length] = compile_program(source)
        return np.asarray(self._programs[padded_length](self._weights, padded))[:length]

    def _forward(self, weights: Weights, token_ids: Int[Array, " T"]) -> Float[Array, "T V"]:
        model = self._template.merge(weights)
        hidden, _ = model(token_ids, jnp.arange(len(token_ids)), jnp.zeros(0), self._attend)
        return model.logits(hidden)

    def _attend(
        self, layer: Int[Array, ""], q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages
    ) -> tuple[Float[Array, "T N H"], Pages]:
        del layer  # nothing is kept
        heads = PartitionSpec(None, TENSOR)
        over_heads = jax.shard_map(causal_attention, mesh=self._mesh, in_specs=(heads, heads, heads), out_specs=heads, check_vma=False)
        return over_heads(q, k, v), pages


def causal_attention(q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"]) -> Float[Array, "T N H"]:
    """Every query over all tokens up to its own, in float32."""
    num_tokens, num_heads, head_size = q.shape
    grouped = q.reshape(num_tokens, k.shape[1], num_heads // k.shape[1], head_size).astype(jnp.float32)
    scores = jnp.einsum("tknh,skh->knts", grouped, k.astype(jnp.float32)) * head_size**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(num_tokens, dtype=bool), scores, -jnp.inf), axis=-1)
    return jnp.einsum("knts,skh->tknh", weights, v.astype(jnp.float32)).reshape(q.shape).astype(q.dtype)
