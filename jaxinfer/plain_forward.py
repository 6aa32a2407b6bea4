"""The plain forward pass: whole sequence, dense causal attention, no pages, no batch. What the engine is checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from jaxinfer.models.base import run_part
from jaxinfer.runtime.compilation import Executable, ProgramSource, compile_program
from jaxinfer.runtime.template import ModelTemplate, Weights
from pallas_kernels.seen import first_seen
from sharding.mesh import TENSOR
from sharding.partition import replicated

_SHORTEST = 32  # tokens; lengths are rounded up to powers of two, so that few programs serve all


class PlainForward:
    """Compiles on first use of a length, and says nothing of it to the engine's count of compilations after ready."""

    def __init__(self, stages: Sequence[tuple[ModelTemplate, Mesh]], weights: Sequence[Weights]) -> None:
        self._stages, self._weights = tuple(stages), tuple(weights)
        self._programs: dict[tuple[int, int], Executable] = {}

    def logits(self, token_ids: list[int]) -> Float[np.ndarray, "T V"]:
        """float32 scores of what follows each token."""
        length = len(token_ids)
        padded_length = max(_SHORTEST, 1 << math.ceil(math.log2(length)))
        padded = np.zeros(padded_length, np.int32)
        padded[:length] = token_ids
        handed: Any = padded
        for number, ((_, mesh), weights) in enumerate(zip(self._stages, self._weights, strict=True)):
            handed = jax.device_put(handed, replicated(mesh))
            if (number, padded_length) not in self._programs:
                self._programs[number, padded_length] = self._compile(number, handed)
            handed = self._programs[number, padded_length](weights, handed)
        return np.asarray(handed)[:length]

    def _compile(self, number: int, handed: Array) -> Executable:
        template, mesh = self._stages[number]
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), (self._weights[number], handed))
        name = f"plain forward/{len(handed)} stage {number + 1}"
        return compile_program(ProgramSource(name, partial(_forward, template, mesh), like, mesh))


def _forward(template: ModelTemplate, mesh: Mesh, weights: Weights, handed: Int[Array, " T"] | Float[Array, "T D"]) -> Float[Array, "T X"]:
    """A stage: logits of the last, hidden states of others."""
    model, hidden = template.merge(weights), None if template.is_first else handed
    x, _ = run_part(model, template.part, handed, hidden, jnp.arange(len(handed)), jnp.zeros(0), _Everywhere(mesh))
    return jax.sharding.reshard(model.logits(x), PartitionSpec()) if template.is_last else x


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
