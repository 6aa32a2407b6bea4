"""The router of a mixture-of-experts layer: each token's experts and their weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers.matrices import weight

_FLOAT32 = jnp.dtype(jnp.float32)


class Router(nnx.Module):
    """Scores, weights and parameters are float32 for any type of the model: bfloat16 would choose other experts."""

    def __init__(self, size: int, routing: Routing) -> None:
        assert routing.top_k <= routing.num_experts and routing.num_experts % routing.num_groups == 0, routing
        self.routing = routing
        self.kernel = weight((size, routing.num_experts), ("embed", "choices"), _FLOAT32)
        self.bias = weight((routing.num_experts,), ("choices",), _FLOAT32) if routing.has_bias else None

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float[Array, "T k"]]:
        """Each token's experts, best first (ties by index), and their float32 weights."""
        routing = self.routing
        logits = jnp.matmul(x.astype(_FLOAT32), self.kernel[...], precision="highest")  # a GPU's default keeps 10 bits
        scores = jax.nn.softmax(logits) if routing.scoring == "softmax" else jax.nn.sigmoid(logits)
        # Logits have the order of scores, and still differ where sigmoids round to 1.
        ranked = logits if self.bias is None else scores + self.bias[...]
        if routing.num_groups > 1:
            ranked = _within_best_groups(scores if self.bias is None else ranked, routing.num_groups, routing.top_groups)
        _, experts = jax.lax.top_k(ranked, routing.top_k)
        self.chosen = nnx.Intermediate(experts)  # see `pipeline.expert_loads`
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if routing.normalises:
            weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
        return experts, weights * routing.scale


def _within_best_groups(ranked: Float[Array, "T E"], num_groups: int, top_groups: int) -> Float[Array, "T E"]:
    """The scores with -inf for experts outside a token's best groups."""
    groups = ranked.reshape(len(ranked), num_groups, -1)
    best_two, _ = jax.lax.top_k(groups, 2)
    _, chosen = jax.lax.top_k(best_two.sum(-1), top_groups)
    is_in = (chosen[:, :, None] == jnp.arange(num_groups)).any(1)
    return jnp.where(is_in[:, :, None], groups, -jnp.inf).reshape(ranked.shape)
