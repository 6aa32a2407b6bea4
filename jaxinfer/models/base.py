"""What the programs need of a model."""

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
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import AttentionBackend, LayerAttention
from jaxinfer.layers.deferred_collectives import all_gather, shard_tokens
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.models.config import ArchitectureConfig
from sharding.mesh import TENSOR


class CausalLM(Protocol):
    """A Flax NNX module; it is built abstractly and split once, and only programs put it together again."""

    weight_map: WeightMap
    config: ArchitectureConfig

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """From the keys of a config.json of one of its architectures. Raises `UnsupportedModelError` naming the field."""
        ...

    def __init__(self, config: ArchitectureConfig, form: MatrixFormat, activation_dtype: jnp.dtype) -> None:
        """`form` is the matrices'; what flows between layers, keys and values too, has `activation_dtype`."""
        ...

    def embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """What the first layer takes of packed tokens."""
        ...

    def run(
        self, x: Float[Array, "T D"], positions: Int[Array, " T"], pages: Pages, attend: AttentionBackend, layers: range
    ) -> tuple[Float[Array, "T D"], Pages]:
        """x through these layers in turn, and the pages with the tokens' keys and values in them."""
        ...

    def finish(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Final hidden states from what the last layer gives."""
        ...

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """float32 scores over the vocabulary."""
        ...

    def best(self, hidden: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The highest-scoring token of each: the argmax of `logits`, where nothing else is asked of them."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSlice:
    """What a pipeline's stage holds of a model."""

    layers: range
    is_first: bool  # it embeds tokens
    is_last: bool  # it has the head, and all else that comes after the layers

    @classmethod
    def whole(cls, num_layers: int) -> ModelSlice:
        return cls(range(num_layers), True, True)

    def holds(self, path: str, *, is_tied: bool) -> bool:
        """Whether it needs a parameter, such as "blocks.3.mlp_norm.scale"; `is_tied`: the embedding is the head too."""
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
    """A part of a model, or all of it, over packed tokens: from their ids where it is the first, else from the hidden states of the part
    before it; to final hidden states where it is the last. `splits_tokens`: between sums each device has its share of the tokens, which a
    multiple of the devices must be."""
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
    """x through the blocks of these layers in turn, as `call(block, x, pages, its attend)`. Blocks of one structure are traced once, not each anew:
    tracing is what a start with a warm compilation cache spends its time on. XLA inlines them all the same. What modules of a block leave as
    `nnx.Intermediate` is left in the block given."""

    @partial(jax.jit, static_argnums=0)
    def run(graph: nnx.GraphDef, state: nnx.State, x: Array, pages: Pages, location: Any) -> tuple[Array, Pages, nnx.State]:
        block = nnx.merge(graph, state)
        x, pages = call(block, x, pages, attend.at(location))
        return x, pages, nnx.pop(block, nnx.Intermediate)

    for layer in layers:
        x, pages, left = run(*nnx.split(blocks[layer]), x, pages, attend.location(layer))
        if left:
            nnx.update(blocks[layer], left)
    return x, pages
