"""The feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.deferred_collectives import PartialSums, all_gather, axis_of_tokens
from jaxinfer.layers.linear import Linear, silu
from jaxinfer.layers.matrices import MatrixFormat

Activation: TypeAlias = Callable[[Float[Array, "..."]], Float[Array, "..."]]


class GatedMLP(nnx.Module):
    """SwiGLU, or a relative of it with another activation (arXiv:2002.05202)."""

    def __init__(self, size: int, inner_size: int, form: MatrixFormat, *, use_bias: bool, activation: Activation = silu) -> None:
        self.activation = activation
        self.gate_up = Linear({"embed": size}, {"gate_up": 2, "mlp": inner_size}, form, use_bias=use_bias)
        self.down = Linear({"mlp": inner_size}, {"embed": size}, form, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(self._inner(all_gather(x)), axis_of_tokens(x))

    def parts(self, x: Float[Array, "T D"]) -> PartialSums:
        """Each device's part of the result, of tokens that all have."""
        return self.down.parts(self._inner(x))

    def _inner(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        gate_up = self.gate_up(x)
        return self.activation(gate_up[:, 0]) * gate_up[:, 1]


class MLP(nnx.Module):
    """Two products with a GELU between them."""

    def __init__(self, size: int, inner_size: int, form: MatrixFormat, *, use_bias: bool) -> None:
        self.up = Linear({"embed": size}, {"mlp": inner_size}, form, use_bias=use_bias)
        self.down = Linear({"mlp": inner_size}, {"embed": size}, form, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(gelu(self.up(x)))


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x times the normal distribution's cumulative function (arXiv:1606.08415), exactly."""
    return x * 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The same approximately, by a hyperbolic tangent."""
    return jax.nn.gelu(x, approximate=True)
