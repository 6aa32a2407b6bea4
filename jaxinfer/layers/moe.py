"""Mixture-of-experts layers (arXiv:1701.06538): each token uses a few of many MLPs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers.deferred_collectives import PartialSums, all_gather, as_partial_sum, axis_of_tokens, reduce_partial_sums, shard_tokens
from jaxinfer.layers.expert_rows import combine_expert_outputs, through_experts
from jaxinfer.layers.matrices import weight
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.router import Router
from jaxinfer.weights.formats.registry import EXPERT_FORMATS
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.grouped_matmul import op
from pallas_kernels.grouped_matmul.formats import Weights
from sharding.expert_exchange import Exchange, MoELayerWork, choose, link_for

logger = logging.getLogger(__name__)


class MixtureOfExperts(nnx.Module):
    """A router, the experts, and with `shared_size` (its MLP width) a shared expert for every token."""

    def __init__(
        self, size: int, inner_size: int, routing: Routing, weight_format: ModelWeightFormat, *, shared_size: int | None = None
    ) -> None:
        self.router = Router(size, routing)
        self.experts = Experts(size, inner_size, routing, weight_format)
        self.shared = None if shared_size is None else GatedMLP(size, shared_size, weight_format, use_bias=False)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        # Shared and routed outputs are added first: one reduction for both.
        tokens, x = axis_of_tokens(x), all_gather(x)
        return self.experts(x, *self.router(x), None if self.shared is None else self.shared.parts(x), tokens)


class Experts(nnx.Module):
    """SwiGLU for each expert. The matrices are plain, inputs first, of the model's type (bfloat16 in an int8 model); or
    words and scales of one of `EXPERT_FORMATS`, if the weight format says so. Over devices, either the columns of each
    expert are split (tensor parallel), or each device has whole experts (expert parallel): the parameters' sharding
    decides."""

    def __init__(self, size: int, inner_size: int, routing: Routing, weight_format: ModelWeightFormat) -> None:
        self.routing = routing
        self.packing, self.backend = weight_format.experts.packing, weight_format.experts.backend
        experts, outer, inner = {"experts": routing.num_experts}, {"embed": size}, {"gate_up": 2, "expert_mlp": inner_size}
        if self.packing is None:
            self.gate_up = _plain(experts | outer | inner, weight_format)
            self.down = _plain(experts | {"expert_mlp": inner_size} | outer, weight_format)
        else:
            self._add_packed("gate_up", self.packing, experts | inner | outer)
            self._add_packed("down", self.packing, experts | outer | {"expert_mlp": inner_size})

    def __call__(
        self,
        x: Float[Array, "T D"],
        experts: Int[Array, "T k"],
        weights: Float[Array, "T k"],
        also: PartialSums | None = None,
        tokens: str | None = None,
    ) -> Float[Array, "T D"]:
        """Each token's weighted sum over its experts, plus the partial sums `also`: on every device, or with tokens
        split over the mesh axis `tokens`."""
        inputs, (axis, is_dealt_out) = (x, experts, weights, *self._arrays()), self._axis()
        part = partial(self._part, dealt_over=axis if is_dealt_out else None)
        if self._exchange(x, has_shared=also is not None) == "all_to_all":
            routed = self._over_shards(partial(_sent_home, part=part, axis=axis), PartitionSpec())(*inputs)
            routed = routed if tokens is None else shard_tokens(routed, tokens)
            return routed if also is None else routed + reduce_partial_sums(also, tokens)
        parts = self._over_shards(as_partial_sum(part), PartitionSpec(axis))(*inputs)
        return reduce_partial_sums(parts if also is None else parts + also, tokens)

    def _arrays(self) -> list[Array]:
        """Arrays of gate and up, then of down."""
        if self.packing is None:
            return [self.gate_up[...], self.down[...]]
        suffixes = EXPERT_FORMATS[self.packing].suffixes
        return [getattr(self, name + suffix)[...] for name in ("gate_up", "down") for suffix in suffixes]

    def _add_packed(self, name: str, packing: str, axes: dict[str, int]) -> None:
        """Add a matrix's parameters; the last two axes are outputs and inputs."""
        for leaf, metadata in EXPERT_FORMATS[packing].parameters(axes):
            param = weight(leaf.shape, leaf.axes, leaf.dtype)
            param.set_metadata(**metadata)
            setattr(self, name + leaf.suffix, param)

    def _axis(self) -> tuple[str | None, bool]:
        """The mesh axis over which experts are split, if any, and whether whole ones are."""
        spec = jax.typeof(self._arrays()[-1]).sharding.spec
        return (spec[0], True) if spec[0] is not None else (spec[1 if self.packing is None else 2], False)

    def _exchange(self, x: Float[Array, "T D"], *, has_shared: bool) -> Exchange:
        (axis, is_dealt_out), mesh, routing = self._axis(), jax.typeof(self._arrays()[0]).sharding.mesh, self.routing
        if axis is None or not is_dealt_out or mesh.shape[axis] == 1:
            return "replicate"
        num_tokens, size = x.shape
        mixture = MoELayerWork(num_tokens, size, x.dtype.itemsize, routing.num_experts, routing.top_k, mesh.shape[axis], has_shared)
        exchange, why = choose(mixture, link_for(mesh.abstract_device.device_kind))
        logger.info("experts of %d tokens on %d devices: %s (%s)", num_tokens, mixture.num_devices, exchange, why)
        return exchange

    def _over_shards(self, local: Callable[..., Array], out: PartitionSpec) -> Callable[..., Array]:
        """`local`, a function of x, experts, weights and arrays, on every device."""
        shardings = [jax.typeof(array).sharding for array in self._arrays()]
        specs = (*[PartitionSpec()] * 3, *(sharding.spec for sharding in shardings))
        over_shards: Callable[..., Array] = jax.shard_map(local, mesh=shardings[0].mesh, in_specs=specs, out_specs=out, check_vma=False)
        return over_shards

    def _part(self, x: Array, experts: Array, weights: Array, *arrays: Array, dealt_over: str | None) -> Float[Array, "T D"]:
        """On one device: from its columns of all experts, or from its own experts with expert parallelism."""
        first = None if dealt_over is None else jax.lax.axis_index(dealt_over) * len(arrays[0])
        gate_up, down = _matrices(arrays, self.packing)
        return through_experts(
            x, experts, weights, gate_up, down, first=first, scales_input=self.routing.scales_input, backend=self.backend
        )


def unsupported_reason(
    size: int, inner_size: int, num_devices: int, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype
) -> str | None:
    """Why grouped_matmul's 'mosaic_gpu' can't run experts of these sizes, each split over `num_devices` (1 with expert
    parallelism), on a GPU that it is for; None if it can."""
    of_device = inner_size // num_devices
    types = [activation_dtype] if weight_format.experts.packing else [activation_dtype, weight_format.expert_dtype]
    products = [(size, 2 * of_device), (of_device, size)]
    return next(filter(None, (op.unsupported_reason(*sizes, dtype) for dtype in types for sizes in products)), None)


def _plain(axes: dict[str, int], weight_format: ModelWeightFormat) -> nnx.Param:
    return weight(tuple(axes.values()), tuple(axes), weight_format.expert_dtype)


def _sent_home(
    x: Array, experts: Array, weights: Array, *arrays: Array, part: Callable[..., Array], axis: str | None
) -> Float[Array, "T D"]:
    """Expert parallelism on one device: compute its experts' part, then combine."""
    assert axis is not None
    has_part = (experts[:, :, None] // len(arrays[0]) == jnp.arange(jax.lax.axis_size(axis))).any(1)
    return combine_expert_outputs(part(x, experts, weights, *arrays), has_part, axis)


def _matrices(arrays: tuple[Array, ...], packing: str | None) -> tuple[Weights, Weights]:
    """Weights for `grouped_matmul`, with gate and up in one."""
    if packing is None:
        gate_up, down = arrays
        return gate_up.reshape(*gate_up.shape[:2], -1), down
    packed, half = EXPERT_FORMATS[packing], len(arrays) // 2
    return packed.weights(arrays[:half]), packed.weights(arrays[half:])
