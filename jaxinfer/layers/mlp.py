"""The gated feed-forward part of a block (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.linear import Linear, silu


class GatedMLP(nnx.Module):
    def __init__(self, size: int, inner_size: int, dtype: jnp.dtype, *, use_bias: bool) -> None:
        self.gate_up = Linear({"embed": size}, {"gate_up": 2, "mlp": inner_size}, dtype, use_bias=use_bias)
        self.down = Linear({"mlp": inner_size}, {"embed": size}, dtype, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = self.gate_up(x)
        return self.down(silu(gate_up[:, 0]) * gate_up[:, 1])
