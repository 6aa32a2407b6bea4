"""Mixtures of experts (arXiv:1701.06538): feed-forward parts of which each token takes a few."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.layers.deferred_collectives import PartialSums, all_gather, as_partial_sum, axis_of_tokens, reduce_partial_sums, shard_tokens
from jaxinfer.layers.expert_rows import combine_expert_outputs, through_experts
from jaxinfer.layers.matrices import MatrixFormat, weight
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.router import Router
from jaxinfer.models.config import Routing
from pallas_kernels.grouped_matmul import op
from pallas_kernels.grouped_matmul.formats import INPUTS, KINDS, OUTPUTS, PARTS, Weights
from sharding.expert_exchange import Exchange, Mixture, choose, link_for

logger = logging.getLogger(__name__)


class MixtureOfExperts(nnx.Module):
    """The feed-forward part of a block: a router, the experts, and one that every token takes besides where `shared_size` is its inner size."""

    def __init__(self, size: int, inner_size: int, routing: Routing, form: MatrixFormat, *, shared_size: int | None = None) -> None:
        self.router = Router(size, routing)
        self.experts = Experts(size, inner_size, routing, form)
        self.shared = None if shared_size is None else GatedMLP(size, shared_size, form, use_bias=False)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        # Shared and routed parts are added first: one sum over devices for both.
        tokens, x = axis_of_tokens(x), all_gather(x)
        return self.experts(x, *self.router(x), None if self.shared is None else self.shared.parts(x), tokens)


class Experts(nnx.Module):
    """SwiGLU once for each expert. The matrices are plain, with their inputs first, of the model's type; in a model of 8-bit integers, bfloat16;
    or they are the words and scales of `pallas_kernels.grouped_matmul.formats`, where the form says so. Over devices either each expert is
    split by its inner columns or experts are dealt out whole: what the parameters' shardings say."""

    def __init__(self, size: int, inner_size: int, routing: Routing, form: MatrixFormat) -> None:
        self.routing = routing
        self.packing, self.backend = form.experts.packing, form.experts.backend
        experts, outer, inner = {"experts": routing.num_experts}, {"embed": size}, {"gate_up": 2, "expert_mlp": inner_size}
        if self.packing is None:
            self.gate_up = _plain(experts | outer | inner, form)
            self.down = _plain(experts | {"expert_mlp": inner_size} | outer, form)
        else:
            self.gate_up_words, self.gate_up_scales = _packed(self.packing, experts | inner | outer)
            self.down_words, self.down_scales = _packed(self.packing, experts | outer | {"expert_mlp": inner_size})

    def __call__(
        self,
        x: Float[Array, "T D"],
        experts: Int[Array, "T k"],
        weights: Float[Array, "T k"],
        also: PartialSums | None = None,
        tokens: str | None = None,
    ) -> Float[Array, "T D"]:
        """Each token's sum over its experts, by their weights, with what these other parts come to added: on every device, or with tokens
        split over this mesh axis."""
        inputs, (axis, is_dealt_out) = (x, experts, weights, *self._arrays()), self._axis()
        part = partial(self._part, dealt_over=axis if is_dealt_out else None)
        if self._exchange(x, has_shared=also is not None) == "all_to_all":
            routed = self._over_shards(partial(_sent_home, part=part, axis=axis), PartitionSpec())(*inputs)
            routed = routed if tokens is None else shard_tokens(routed, tokens)
            return routed if also is None else routed + reduce_partial_sums(also, tokens)
        parts = self._over_shards(as_partial_sum(part), PartitionSpec(axis))(*inputs)
        return reduce_partial_sums(parts if also is None else parts + also, tokens)

    def _arrays(self) -> list[Array]:
        """Of gate and up, then of down."""
        if self.packing is None:
            return [self.gate_up[...], self.down[...]]
        return [param[...] for param in (self.gate_up_words, self.gate_up_scales, self.down_words, self.down_scales)]

    def _axis(self) -> tuple[str | None, bool]:
        """The mesh axis that experts lie on, if any, and whether whole ones do."""
        spec = jax.typeof(self._arrays()[-1]).sharding.spec
        return (spec[0], True) if spec[0] is not None else (spec[1 if self.packing is None else 2], False)

    def _exchange(self, x: Float[Array, "T D"], *, has_shared: bool) -> Exchange:
        (axis, is_dealt_out), mesh, routing = self._axis(), jax.typeof(self._arrays()[0]).sharding.mesh, self.routing
        if axis is None or not is_dealt_out or mesh.shape[axis] == 1:
            return "replicate"
        num_tokens, size = x.shape
        mixture = Mixture(num_tokens, size, x.dtype.itemsize, routing.num_experts, routing.top_k, mesh.shape[axis], has_shared)
        exchange, why = choose(mixture, link_for(mesh.abstract_device.device_kind))
        logger.info("experts of %d tokens on %d devices: %s (%s)", num_tokens, mixture.num_devices, exchange, why)
        return exchange

    def _over_shards(self, local: Callable[..., Array], out: PartitionSpec) -> Callable[..., Array]:
        """`local`, of x, experts, weights and arrays, on every device."""
        shardings = [jax.typeof(array).sharding for array in self._arrays()]
        specs = (*[PartitionSpec()] * 3, *(sharding.spec for sharding in shardings))
        over_shards: Callable[..., Array] = jax.shard_map(local, mesh=shardings[0].mesh, in_specs=specs, out_specs=out, check_vma=False)
        return over_shards

    def _part(self, x: Array, experts: Array, weights: Array, *arrays: Array, dealt_over: str | None) -> Float[Array, "T D"]:
        """On one device: of its columns of all experts, or of those that it has of experts dealt out over a mesh axis."""
        first = None if dealt_over is None else jax.lax.axis_index(dealt_over) * len(arrays[0])
        gate_up, down = _matrices(arrays, self.packing)
        return through_experts(
            x, experts, weights, gate_up, down, first=first, scales_input=self.routing.scales_input, backend=self.backend
        )


def unsupported_reason(size: int, inner_size: int, num_devices: int, form: MatrixFormat, activation_dtype: jnp.dtype) -> str | None:
    """Why grouped_matmul's 'mosaic_gpu' can't run experts of these sizes, each split over so many devices (1: they have whole ones), on a GPU that
    it is for; None if it can."""
    of_device = inner_size // num_devices
    types = [activation_dtype] if form.experts.packing else [activation_dtype, form.expert_dtype]
    products = [(size, 2 * of_device), (of_device, size)]
    return next(filter(None, (op.unsupported_reason(*sizes, dtype) for dtype in types for sizes in products)), None)


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


def _sent_home(
    x: Array, experts: Array, weights: Array, *arrays: Array, part: Callable[..., Array], axis: str | None
) -> Float[Array, "T D"]:
    """On one device."""
    assert axis is not None
    has_part = (experts[:, :, None] // len(arrays[0]) == jnp.arange(jax.lax.axis_size(axis))).any(1)
    return combine_expert_outputs(part(x, experts, weights, *arrays), has_part, axis)


def _matrices(arrays: tuple[Array, ...], packing: Literal["int4", "fp8"] | None) -> tuple[Weights, Weights]:
    """As `grouped_matmul` takes them: gate and up are one."""
    if packing is None:
        gate_up, down = arrays
        return gate_up.reshape(*gate_up.shape[:2], -1), down
    *of_gate_up, words, scales = arrays
    flat = [array.reshape(len(array), -1, *array.shape[3:]) for array in of_gate_up]
    return KINDS[packing](*flat), KINDS[packing](words, scales)
