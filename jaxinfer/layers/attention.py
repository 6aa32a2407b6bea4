"""Multi-head attention with grouped KV heads. Where keys and values are kept is the caller's business, not the layer's."""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.linear import Linear
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
    def __init__(self, size: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: jnp.dtype, *, use_bias: bool) -> None:
        embed, heads, kv_heads = (
            {"embed": size},
            {"heads": num_heads, "head_size": head_size},
            {"kv_heads": num_kv_heads, "head_size": head_size},
        )
        self.q = Linear(embed, heads, dtype, use_bias=use_bias)
        self.k = Linear(embed, kv_heads, dtype, use_bias=use_bias)
        self.v = Linear(embed, kv_heads, dtype, use_bias=use_bias)
        self.out = Linear(heads, embed, dtype, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: Attend) -> tuple[Float[Array, "T D"], Pages]:
        attended, pages = attend(rotate(self.q(x), cos_sin), rotate(self.k(x), cos_sin), self.v(x), pages)
        return self.out(attended), pages
