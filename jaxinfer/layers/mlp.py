"""MLPs: the feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.layers.deferred_collectives import PartialSums, all_gather, axis_of_tokens
from jaxinfer.layers.linear import Linear, silu
from jaxinfer.weights.formats.weight_format import ModelWeightFormat

Activation: TypeAlias = Callable[[Float[Array, "..."]], Float[Array, "..."]]


class GatedMLP(nnx.Module):
    """SwiGLU, or a variant with another activation (arXiv:2002.05202)."""

    def __init__(
        self, size: int, inner_size: int, weight_format: ModelWeightFormat, *, use_bias: bool, activation: Activation = silu
    ) -> None:
        self.activation = activation
        self.gate_up = Linear({"embed": size}, {"gate_up": 2, "mlp": inner_size}, weight_format, use_bias=use_bias)
        self.down = Linear({"mlp": inner_size}, {"embed": size}, weight_format, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(self._inner(all_gather(x)), axis_of_tokens(x))

    def parts(self, x: Float[Array, "T D"]) -> PartialSums:
        """Each device's partial sums, for tokens that all devices have."""
        return self.down.parts(self._inner(x))

    def _inner(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        gate_up = self.gate_up(x)
        return self.activation(gate_up[:, 0]) * gate_up[:, 1]


class MLP(nnx.Module):
    """Two products with a GELU between them."""

    def __init__(self, size: int, inner_size: int, weight_format: ModelWeightFormat, *, use_bias: bool) -> None:
        self.up = Linear({"embed": size}, {"mlp": inner_size}, weight_format, use_bias=use_bias)
        self.down = Linear({"mlp": inner_size}, {"embed": size}, weight_format, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(gelu(self.up(x)))


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x times the normal distribution's cumulative function (arXiv:1606.08415), exact."""
    return x * 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU's approximation with tanh."""
    return jax.nn.gelu(x, approximate=True)
