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
from pallas_kernels.grouped_matmul import op
from pallas_kernels.grouped_matmul.formats import INPUTS, KINDS, OUTPUTS, PARTS, Weights
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
    """SwiGLU once for each expert. The matrices are plain, with their inputs first, of the model's type; in a model of 8-bit integers, bfloat16;
    or they are the words and scales of `pallas_kernels.grouped_matmul.formats`, where the form says so."""

    def __init__(self, size: int, inner_size: int, routing: Routing, form: MatrixFormat) -> None:
        self.scales_input = routing.scales_input
        self.packing, self.backend = form.experts.packing, form.experts.backend
        experts, outer, inner = {"experts": routing.num_experts}, {"embed": size}, {"gate_up": 2, "expert_mlp": inner_size}
        if self.packing is None:
            self.gate_up = _plain(experts | outer | inner, form)
            self.down = _plain(experts | {"expert_mlp": inner_size} | outer, form)
        else:
            self.gate_up_words, self.gate_up_scales = _packed(self.packing, experts | inner | outer)
            self.down_words, self.down_scales = _packed(self.packing, experts | outer | {"expert_mlp": inner_size})

    def __call__(self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
        """Each token's sum over its experts, by their weights. Inner columns that are split over devices are summed over them."""
        if self.packing is None:
            params, inner_axis = [self.gate_up, self.down], 1
        else:
            params, inner_axis = [self.gate_up_words, self.gate_up_scales, self.down_words, self.down_scales], 2
        arrays = [param[...] for param in params]
        shardings = [jax.typeof(array).sharding for array in arrays]
        mesh, split_over = shardings[-1].mesh, shardings[-1].spec[inner_axis]
        if split_over is not None and mesh.shape[split_over] == 1:
            split_over = None
        over_shards = jax.shard_map(
            partial(_local, packing=self.packing, scales_input=self.scales_input, backend=self.backend, split_over=split_over),
            mesh=mesh,
            in_specs=(*[PartitionSpec()] * 3, *(sharding.spec for sharding in shardings)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return over_shards(x, experts, weights, *arrays)


def why_not(size: int, inner_size: int, num_devices: int, form: MatrixFormat, activation_dtype: jnp.dtype) -> str | None:
    """Why grouped_matmul's 'mosaic_gpu' can't run experts of these sizes, each split over so many devices (1: they have whole ones), on a Hopper GPU;
    None if it can."""
    of_device = inner_size // num_devices
    types = [activation_dtype] if form.experts.packing else [activation_dtype, form.expert_dtype]
    products = [(size, 2 * of_device), (of_device, size)]
    return next(filter(None, (op.why_not(*sizes, dtype) for dtype in types for sizes in products)), None)


def _plain(axes: dict[str, int], form: MatrixFormat) -> nnx.Param:
    return weight(tuple(axes.values()), tuple(axes), form.expert_dtype)


def _packed(packing: Literal["int4", "fp8"], axes: dict[str, int]) -> list[nnx.Param]:
    """Words and scales, for axes of which the last two are outputs and inputs."""
    *lead, outputs, inputs = axes.values()
    assert outputs % OUTPUTS == 0 and inputs % INPUTS == 0, axes
    params = []
    for part in PARTS[packing]:
        shape = (*lead, outputs // OUTPUTS, inputs // INPUTS, *part.tile)
        param = weight(shape, (*axes, *[None] * len(part.tile)), part.tile_dtype)
        param.set_metadata(part=part.name)
        params.append(param)
    return params


def _local(
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    *arrays: Array,
    packing: Literal["int4", "fp8"] | None,
    scales_input: bool,
    backend: Literal["mosaic_gpu", "xla"],
    split_over: str | None,
) -> Float[Array, "T D"]:
    """On one device, with its inner columns of every expert."""
    gate_up, down = _matrices(arrays, packing)
    num_experts, (num_tokens, top_k) = len(arrays[0]), experts.shape
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)  # of rows, a token's in turn
    group_sizes = (chosen[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    rows = x.at[order // top_k].get(mode="clip")
    if scales_input:
        rows = (rows.astype(jnp.float32) * weights.reshape(-1).at[order].get(mode="clip")[:, None]).astype(x.dtype)
    gate, up = jnp.split(grouped_matmul(rows, gate_up, group_sizes, backend=backend), 2, axis=1)
    rows = grouped_matmul(silu(gate) * up, down, group_sizes, backend=backend)
    # Back by their places, not added up where they belong: always in the same order.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    of_tokens = rows.at[place].get(mode="clip").reshape(num_tokens, top_k, -1).astype(jnp.float32)
    y = (of_tokens if scales_input else of_tokens * weights[:, :, None]).sum(1).astype(x.dtype)
    return y if split_over is None else jax.lax.psum(y, split_over)


def _matrices(arrays: tuple[Array, ...], packing: Literal["int4", "fp8"] | None) -> tuple[Weights, Weights]:
    """As `grouped_matmul` takes them: gate and up are one."""
    if packing is None:
        gate_up, down = arrays
        return gate_up.reshape(*gate_up.shape[:2], -1), down
    *of_gate_up, words, scales = arrays
    flat = [array.reshape(len(array), -1, *array.shape[3:]) for array in of_gate_up]
    return KINDS[packing](*flat), KINDS[packing](words, scales)
