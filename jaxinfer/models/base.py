"""What programs need of a model: the `CausalLM` protocol, and parts of models for pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.weight_map import WeightMap
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import AttentionBackend, LayerAttention
from jaxinfer.layers.deferred_collectives import all_gather, shard_tokens
from jaxinfer.layers.linear import with_context
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from sharding.mesh import TENSOR


class CausalLM(Protocol):
    """A Flax NNX module. It is built abstractly and split once; only programs merge it again."""

    weight_map: WeightMap
    config: ArchitectureConfig

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """From a config.json of one of its architectures. Raises `UnsupportedModelError` naming the field."""
        ...

    def __init__(self, config: ArchitectureConfig, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None:
        """`weight_format`: how matrices are stored. `activation_dtype`: type of hidden states, keys and values."""
        ...

    def embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The first layer's input, from packed tokens."""
        ...

    def run(
        self, x: Float[Array, "T D"], positions: Int[Array, " T"], pages: Pages, attend: AttentionBackend, layers: range
    ) -> tuple[Float[Array, "T D"], Pages]:
        """x through these layers in order; returns it and the pages with the tokens' keys and values written."""
        ...

    def finish(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Final hidden states from the last layer's output."""
        ...

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """float32 logits over the vocabulary."""
        ...

    def best(self, hidden: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The token with the highest logit of each row: the argmax of `logits`, for greedy sampling."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSlice:
    """The part of a model that a pipeline stage has."""

    layers: range
    is_first: bool  # whether it embeds tokens
    is_last: bool  # whether it has the head, and everything else after the layers

    @classmethod
    def whole(cls, num_layers: int) -> ModelSlice:
        return cls(range(num_layers), True, True)

    def holds(self, path: str, *, is_tied: bool) -> bool:
        """Whether a parameter such as "blocks.3.mlp_norm.scale" belongs to it. `is_tied`: the embedding is the head
        too."""
        name, _, rest = path.partition(".")
        if name == "blocks":
            return int(rest.partition(".")[0]) in self.layers
        if name == "embedding":
            return self.is_first or (self.is_last and is_tied)
        return self.is_last


def run_slice(
    model: CausalLM,
    part: ModelSlice | None,
    token_ids: Int[Array, " T"],
    hidden: Float[Array, "T D"] | None,
    positions: Int[Array, " T"],
    pages: Pages,
    attend: AttentionBackend,
    *,
    splits_tokens: bool = False,
) -> tuple[Float[Array, "T D"], Pages]:
    """Run a slice of a model over packed tokens. The first starts from token ids, others from the hidden states of the
    slice before; the last returns final hidden states. `splits_tokens`: sequence parallelism, where each device has its
    share of the tokens between reductions; their number must be a multiple of the devices'."""
    part = part or ModelSlice.whole(model.config.num_layers)
    x = model.embed(token_ids) if hidden is None else hidden
    x, pages = model.run(shard_tokens(x, TENSOR) if splits_tokens else x, positions, pages, attend, part.layers)
    return all_gather(model.finish(x) if part.is_last else x), pages


def run_blocks(
    blocks: Sequence[nnx.Module],
    layers: range,
    x: Float[Array, "T D"],
    pages: Pages,
    attend: AttentionBackend,
    call: Callable[[Any, Array, Pages, LayerAttention], tuple[Array, Pages]],
) -> tuple[Float[Array, "T D"], Pages]:
    """x through the blocks of these layers in order, by `call(block, x, pages, its attention)`. Blocks of one structure
    are traced once: tracing dominates a start with a warm compilation cache. XLA inlines them all the same. A block's
    `nnx.Intermediate` values are stored in the given block."""

    @partial(jax.jit, static_argnums=0)
    def run(graph: nnx.GraphDef, state: nnx.State, x: Array, pages: Pages, location: Any) -> tuple[Array, Pages, nnx.State]:
        block = with_context(nnx.merge(graph, state), attend.context)
        x, pages = call(block, x, pages, attend.at(location))
        return x, pages, nnx.pop(block, nnx.Intermediate)

    for layer in layers:
        x, pages, left = run(*nnx.split(blocks[layer]), x, pages, attend.location(layer))
        if left:
            nnx.update(blocks[layer], left)
    return x, pages
