"""Multi-head attention with grouped KV heads. The caller decides where keys and values are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.deferred_collectives import all_gather, axis_of_tokens
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.norm import HeadsRMSNorm, RMSNorm
from jaxinfer.layers.rope import CosSin, rotate
from jaxinfer.layers.step_context import StepContext
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.span import FULL_ATTENTION, Span


@dataclass(frozen=True)
class AttentionParams:
    """The scale, span and soft cap of a layer's attention."""

    scale: float  # multiplies the scores
    span: Span = FULL_ATTENTION
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap)


class LayerAttention(Protocol):
    """Attention of one layer, as the running program does it: prefill over packed chunks, decode over one token a row,
    the reference forward pass over its own tokens only. Takes the pages, returns them with the tokens' KV written."""

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages, params: AttentionParams
    ) -> tuple[Float[Array, "T N H"], Pages]:
        """Writes keys and values, then attends."""
        ...

    def latents(
        self, q: Float[Array, "T N H"], latents: Float[Array, "T C"], up: Float[Array, "R N E"], pages: Pages, scale: float
    ) -> tuple[Float[Array, "T N V"], Pages]:
        """Writes latents, then attends. `up` makes every head's keys (except the last C - R columns) and values from
        the first R columns. Prefill expands the latents that it reads; decode projects queries and outputs instead
        (`latent_attention.absorbed`)."""
        ...


class AttentionBackend(Protocol):
    """`LayerAttention` of every layer of a model. `location(layer)` is what differs between layers, as a pytree, so
    that layers of one structure share a trace; `at` takes it."""

    @property
    def context(self) -> StepContext:
        """What the step's rows bring to linear products, by token; `run_blocks` gives it to every block's."""
        ...

    def location(self, layer: int) -> Any: ...

    def at(self, location: Any) -> LayerAttention: ...


class Attention(nnx.Module):
    """`norm_epsilon`: queries and keys are normalised before RoPE, each head by `norm`, or with `norms_heads_as_one` a
    token's whole width by RMS; None: not at all. `has_out_bias`: whether the output has a bias where the others do.
    `heads`: how a mesh's heads map to the model's own, where they differ."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        weight_format: ModelWeightFormat,
        *,
        use_bias: bool,
        has_out_bias: bool = True,
        params: AttentionParams | None = None,
        norm_epsilon: float | None = None,
        norm: type[RMSNorm] = RMSNorm,
        norms_heads_as_one: bool = False,
        heads: HeadLayout | None = None,
    ) -> None:
        self.heads_per_kv = num_heads // num_kv_heads
        self.params = params or AttentionParams(head_size**-0.5)
        # One fused product, by KV head: its queries, key, value. Few large arrays: each costs the host time a call.
        group = {"kv_heads": num_kv_heads, "q_k_v": self.heads_per_kv + 2, "head_size": head_size}
        self.qkv = Linear({"embed": size}, group, weight_format, use_bias=use_bias)
        self.out = Linear({"heads": num_heads, "head_size": head_size}, {"embed": size}, weight_format, use_bias=use_bias and has_out_bias)
        # The mean square over copied KV heads equals that over the originals.
        too_many = (1.0, 1.0) if heads is None else (num_heads / heads.model_heads, num_kv_heads / (heads.model_kv_heads * heads.copies))
        self.q_norm, self.k_norm = (
            None
            if norm_epsilon is None
            else HeadsRMSNorm(count * head_size, norm_epsilon, weight_format, axis, more)
            if norms_heads_as_one
            else norm(head_size, norm_epsilon, weight_format)
            for axis, count, more in (("heads", num_heads, too_many[0]), ("kv_heads", num_kv_heads, too_many[1]))
        )

    def project(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values of all tokens."""
        qkv, g = self.qkv(all_gather(x)), self.heads_per_kv
        q, k, v = qkv[:, :, :g], qkv[:, :, g], qkv[:, :, g + 1]
        # With an explicit sharding: a reshape that removes a single KV head would lose it.
        heads = PartitionSpec(None, jax.typeof(q).sharding.spec[1], None)
        q = jax.lax.reshape(q, (len(q), k.shape[1] * g, q.shape[-1]), out_sharding=heads if heads[1] is not None else None)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: LayerAttention) -> tuple[Float[Array, "T D"], Pages]:
        q, k, v = self.project(x)
        attended, pages = attend(rotate(q, cos_sin), rotate(k, cos_sin), v, pages, self.params)
        return self.out(attended, axis_of_tokens(x)), pages
