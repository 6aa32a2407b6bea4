"""The plain forward pass: whole sequence, dense causal attention, no pages, no batch. What the engine is checked against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import Attend, How
from jaxinfer.layers.latent_attention import expanded
from jaxinfer.runtime.compilation import Executable, ProgramSource, compile_program
from jaxinfer.runtime.template import ModelTemplate, Weights
from pallas_kernels.seen import first_seen
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
        hidden, _ = model(token_ids, jnp.arange(len(token_ids)), jnp.zeros(0), _Everywhere(self._mesh))
        return model.logits(hidden)


@dataclass(frozen=True)
class _Everywhere:
    """Attention in any layer, all of them alike: nothing is kept. See `AttendInLayers` and `Attend`."""

    mesh: Mesh

    def place(self, layer: int) -> Any:
        return ()

    def at(self, place: Any) -> Attend:
        return self

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages, how: How
    ) -> tuple[Float[Array, "T N H"], Pages]:
        heads = PartitionSpec(None, TENSOR)
        attend = partial(causal_attention, how=how)
        over_heads = jax.shard_map(attend, mesh=self.mesh, in_specs=(heads, heads, heads), out_specs=heads, check_vma=False)
        return over_heads(q, k, v), pages

    def latents(
        self, q: Float[Array, "T N H"], latents: Float[Array, "T C"], up: Float[Array, "R N E"], pages: Pages, scale: float
    ) -> tuple[Float[Array, "T N V"], Pages]:
        def local(q: Array, latents: Array, up: Array) -> Array:
            return causal_attention(q, *expanded(latents, up, q.shape[2]), How(scale))

        heads = PartitionSpec(None, TENSOR)
        over_heads = jax.shard_map(local, mesh=self.mesh, in_specs=(heads, PartitionSpec(), heads), out_specs=heads, check_vma=False)
        return over_heads(q, latents, up), pages


def causal_attention(q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K V"], how: How) -> Float[Array, "T N V"]:
    """Every query over the tokens of its span up to its own, in float32."""
    num_tokens, num_heads, head_size = q.shape
    grouped = q.reshape(num_tokens, k.shape[1], num_heads // k.shape[1], head_size).astype(jnp.float32)
    scores = jnp.einsum("tknh,skh->knts", grouped, k.astype(jnp.float32)) * how.scale
    if how.soft_cap is not None:
        scores = jnp.tanh(scores / how.soft_cap) * how.soft_cap
    token = jnp.arange(num_tokens)
    is_seen = (token <= token[:, None]) & (token >= first_seen(how.span, token[:, None]))
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("knts,skh->tknh", weights, v.astype(jnp.float32)).reshape(num_tokens, num_heads, -1).astype(q.dtype)
