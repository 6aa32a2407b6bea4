"""The gated feed-forward part of a block (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.linear import Linear, silu


class GatedMLP(nnx.Module):
    def __init__(self, size: int, inner_size: int, dtype: jnp.dtype, *, use_bias: bool) -> None:
        self.gate = Linear({"embed": size}, {"mlp": inner_size}, dtype, use_bias=use_bias)
        self.up = Linear({"embed": size}, {"mlp": inner_size}, dtype, use_bias=use_bias)
        self.down = Linear({"mlp": inner_size}, {"embed": size}, dtype, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(silu(self.gate(x)) * self.up(x))
