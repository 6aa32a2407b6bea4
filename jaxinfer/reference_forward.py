"""The reference forward pass: a whole sequence with dense causal attention, without pages or batches. The engine is
compared with it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Compiled
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import AttentionParams, LayerAttention
from jaxinfer.layers.latent_attention import expanded
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.models.base import run_slice
from jaxinfer.programs.compilation import ProgramSource, compile_program
from jaxinfer.weights.template import ModelTemplate, Weights
from pallas_kernels.visibility import first_visible
from sharding.mesh import TENSOR
from sharding.partition import replicated

TokenIds = Sequence[int] | Int[np.ndarray, " T"]
_SHORTEST = 32  # tokens; lengths are rounded up to powers of two, so that few programs are needed


class ReferenceForward:
    """Compiles on first use of a length; these compilations are not counted as unexpected. Any thread may call it."""

    def __init__(self, stages: Sequence[tuple[ModelTemplate, Mesh]], weights: Callable[[], Sequence[Weights]]) -> None:
        """`weights`: gives those of each stage, which may be others later."""
        self._stages, self._weights = tuple(stages), weights
        self._programs: dict[int, list[Compiled]] = {}  # padded length -> a program a stage
        self._compiling = threading.Lock()

    def logits(self, token_ids: TokenIds) -> Float[np.ndarray, "T V"]:
        """float32 logits of the next token after each token."""
        return np.asarray(self.prepare(token_ids)())[: len(token_ids)]

    def prepare(self, token_ids: TokenIds) -> Callable[[], Float[Array, "P V"]]:
        """Compile what is needed; returns a function that runs the pass and returns logits, padding included."""
        padded_length = max(_SHORTEST, 1 << math.ceil(math.log2(len(token_ids))))
        padded = np.zeros(padded_length, np.int32)
        padded[: len(token_ids)] = token_ids
        with self._compiling:
            if padded_length not in self._programs:
                self._programs[padded_length] = self._compile(padded_length)
        return partial(self._run, self._programs[padded_length], padded)

    def _run(self, programs: list[Compiled], handed: Any) -> Any:
        for (_, mesh), weights, program in zip(self._stages, self._weights(), programs, strict=True):
            handed = program(weights, jax.device_put(handed, replicated(mesh)))
        return handed

    def _compile(self, padded_length: int) -> list[Compiled]:
        programs: list[Compiled] = []
        handed: Any = jax.ShapeDtypeStruct((padded_length,), np.int32)
        for number, ((template, mesh), weights) in enumerate(zip(self._stages, self._weights(), strict=True), 1):
            of_weights = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), weights)
            like = (of_weights, jax.ShapeDtypeStruct(handed.shape, handed.dtype, sharding=replicated(mesh)))
            name = f"plain forward/{padded_length} stage {number}"
            programs.append(compile_program(ProgramSource(name, partial(_forward, template, mesh), like, mesh)))
            handed = programs[-1].out_info
        return programs


def _forward(template: ModelTemplate, mesh: Mesh, weights: Weights, handed: Int[Array, " T"] | Float[Array, "T D"]) -> Float[Array, "T X"]:
    """A stage: logits from the last, hidden states from others."""
    model, hidden = template.merge(weights), None if template.is_first else handed
    x, _ = run_slice(model, template.part, handed, hidden, jnp.arange(len(handed)), jnp.zeros(0), _Everywhere(mesh))
    return jax.sharding.reshard(model.logits(x), PartitionSpec()) if template.is_last else x


@dataclass(frozen=True)
class _Everywhere:
    """Attention without a KV cache, the same in every layer. See `AttentionBackend` and `LayerAttention`."""

    mesh: Mesh
    context: StepContext = NO_CONTEXT

    def location(self, layer: int) -> Any:
        return ()

    def at(self, location: Any) -> LayerAttention:
        return self

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages, params: AttentionParams
    ) -> tuple[Float[Array, "T N H"], Pages]:
        heads = PartitionSpec(None, TENSOR)
        attend = partial(causal_attention, params=params)
        over_heads = jax.shard_map(attend, mesh=self.mesh, in_specs=(heads, heads, heads), out_specs=heads, check_vma=False)
        return over_heads(q, k, v), pages

    def latents(
        self, q: Float[Array, "T N H"], latents: Float[Array, "T C"], up: Float[Array, "R N E"], pages: Pages, scale: float
    ) -> tuple[Float[Array, "T N V"], Pages]:
        def local(q: Array, latents: Array, up: Array) -> Array:
            return causal_attention(q, *expanded(latents, up, q.shape[2]), AttentionParams(scale))

        heads = PartitionSpec(None, TENSOR)
        over_heads = jax.shard_map(local, mesh=self.mesh, in_specs=(heads, PartitionSpec(), heads), out_specs=heads, check_vma=False)
        return over_heads(q, latents, up), pages


def causal_attention(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K V"], params: AttentionParams
) -> Float[Array, "T N V"]:
    """Each query attends to the tokens of its span up to its own; computed in float32."""
    num_tokens, num_heads, head_size = q.shape
    grouped = q.reshape(num_tokens, k.shape[1], num_heads // k.shape[1], head_size).astype(jnp.float32)
    scores = jnp.einsum("tknh,skh->knts", grouped, k.astype(jnp.float32)) * params.scale
    if params.soft_cap is not None:
        scores = jnp.tanh(scores / params.soft_cap) * params.soft_cap
    token = jnp.arange(num_tokens)
    is_seen = (token <= token[:, None]) & (token >= first_visible(params.span, token[:, None]))
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("knts,skh->tknh", weights, v.astype(jnp.float32)).reshape(num_tokens, num_heads, -1).astype(q.dtype)
