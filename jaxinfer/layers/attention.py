"""Multi-head attention with grouped KV heads. Where keys and values are kept is the caller's business, not the layer's."""

from __future__ import annotations

from typing import Protocol

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.layers.rope import CosSin, rotate


class Attend(Protocol):
    """Attention proper, as the program that runs the model does it: prefill over packed chunks, decode over one token a row,
    the plain forward pass over nothing but its own tokens. Takes the pages and returns them with the layer's k and v written."""

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages
    ) -> tuple[Float[Array, "T N H"], Pages]: ...


class AttendInLayer(Protocol):
    """`Attend` before it knows its layer's number."""

    def __call__(
        self, layer: Int[Array, ""], q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages
    ) -> tuple[Float[Array, "T N H"], Pages]: ...


class Attention(nnx.Module):
    def __init__(self, size: int, num_heads: int, num_kv_heads: int, head_size: int, form: MatrixFormat, *, use_bias: bool) -> None:
        self.heads_per_kv = num_heads // num_kv_heads
        # One product for all three, by KV head: its query heads, its key, its value. Few large arrays: each costs the host time a call.
        group = {"kv_heads": num_kv_heads, "q_k_v": self.heads_per_kv + 2, "head_size": head_size}
        self.qkv = Linear({"embed": size}, group, form, use_bias=use_bias)
        self.out = Linear({"heads": num_heads, "head_size": head_size}, {"embed": size}, form, use_bias=use_bias)

    def project(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values."""
        qkv, g = self.qkv(x), self.heads_per_kv
        q, k, v = qkv[:, :, :g], qkv[:, :, g], qkv[:, :, g + 1]
        return q.reshape(len(q), -1, q.shape[-1]), k, v

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: Attend) -> tuple[Float[Array, "T D"], Pages]:
        q, k, v = self.project(x)
        attended, pages = attend(rotate(q, cos_sin), rotate(k, cos_sin), v, pages)
        return self.out(attended), pages
