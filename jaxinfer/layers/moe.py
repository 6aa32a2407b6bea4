"""Mixtures of experts (arXiv:1701.06538): feed-forward parts of which each token takes a few."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.linear import silu
from jaxinfer.layers.matrices import MatrixFormat, weight
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.router import Router
from jaxinfer.models.config import Routing
from pallas_kernels.grouped_matmul.op import grouped_matmul


class MixtureOfExperts(nnx.Module):
    """The feed-forward part of a block: a router, the experts, and one that every token takes besides where `shared_size` is its inner size."""

    def __init__(self, size: int, inner_size: int, routing: Routing, form: MatrixFormat, *, shared_size: int | None = None) -> None:
        self.router = Router(size, routing)
        self.experts = Experts(size, inner_size, routing, form)
        self.shared = None if shared_size is None else GatedMLP(size, shared_size, form, use_bias=False)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        y = self.experts(x, *self.router(x))
        return y if self.shared is None else y + self.shared(x)


class Experts(nnx.Module):
    """SwiGLU once for each expert. The matrices are of the model's type as checkpoints have them; in a model of 8-bit integers, bfloat16."""

    def __init__(self, size: int, inner_size: int, routing: Routing, form: MatrixFormat) -> None:
        self.scales_input = routing.scales_input
        self.backend = form.experts.backend
        shape = (routing.num_experts, size, 2, inner_size)
        self.gate_up = weight(shape, ("experts", "embed", "gate_up", "mlp"), form.expert_dtype)
        self.down = weight((routing.num_experts, inner_size, size), ("experts", "mlp", "embed"), form.expert_dtype)

    def __call__(self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
        """Each token's sum over its experts, by their weights. Inner columns that are split over devices are summed over them."""
        gate_up, down = self.gate_up[...], self.down[...]
        sharding = jax.typeof(down).sharding
        split_over = sharding.spec[1]
        over_shards = jax.shard_map(
            partial(_local, scales_input=self.scales_input, backend=self.backend, split_over=split_over),
            mesh=sharding.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(), jax.typeof(gate_up).sharding.spec, sharding.spec),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return over_shards(x, experts, weights, gate_up, down)


def _local(
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    *,
    scales_input: bool,
    backend: Literal["mosaic_gpu", "xla"],
    split_over: str | None,
) -> Float[Array, "T D"]:
    """On one device, with its columns of every expert."""
    (num_tokens, top_k), num_experts = experts.shape, len(down)
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)  # of rows, a token's in turn
    group_sizes = (chosen[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    rows = x.at[order // top_k].get(mode="clip")
    if scales_input:
        rows = (rows * weights.reshape(-1).at[order].get(mode="clip")[:, None]).astype(x.dtype)
    inner = grouped_matmul(rows, gate_up.reshape(*gate_up.shape[:2], -1), group_sizes, backend=backend)
    gate, up = jnp.split(inner, 2, axis=1)
    rows = grouped_matmul(silu(gate) * up, down, group_sizes, backend=backend)
    # Back by their places, not added up where they belong: always in the same order.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    of_tokens = rows.at[place].get(mode="clip").reshape(num_tokens, top_k, -1).astype(jnp.float32)
    y = (of_tokens if scales_input else of_tokens * weights[:, :, None]).sum(1).astype(x.dtype)
    return y if split_over is None else jax.lax.psum(y, split_over)
