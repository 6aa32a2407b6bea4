"""What the programs need of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.weight_map import WeightMap
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import Attend, AttendInLayers
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.models.config import ArchitectureConfig


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

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], pages: Pages, attend: AttendInLayers
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Final hidden states of packed tokens, and the pages with these tokens' keys and values in them."""
        ...

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """float32 scores over the vocabulary."""
        ...

    def best(self, hidden: Float[Array, "X D"]) -> Int[Array, " X"]:
        """The highest-scoring token of each: the argmax of `logits`, where nothing else is asked of them."""
        ...


def run_blocks(
    blocks: Sequence[nnx.Module],
    x: Float[Array, "T D"],
    pages: Pages,
    attend: AttendInLayers,
    call: Callable[[Any, Array, Pages, Attend], tuple[Array, Pages]],
) -> tuple[Float[Array, "T D"], Pages]:
    """x through every block in turn, as `call(block, x, pages, its attend)`. Blocks of one structure are traced once, not each anew:
    tracing is what a start with a warm compilation cache spends its time on. XLA inlines them all the same."""

    @partial(jax.jit, static_argnums=0)
    def run(graph: nnx.GraphDef, state: nnx.State, x: Array, pages: Pages, place: Any) -> tuple[Array, Pages]:
        return call(nnx.merge(graph, state), x, pages, attend.at(place))

    for layer, block in enumerate(blocks):
        x, pages = run(*nnx.split(block), x, pages, attend.place(layer))
    return x, pages
