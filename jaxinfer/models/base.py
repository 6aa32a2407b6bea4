"""What the programs need of a model."""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from checkpoints.weight_map import WeightMap
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import Attend
from jaxinfer.models.config import ArchitectureConfig


class CausalLM(Protocol):
    """A Flax NNX module; it is built abstractly and split once, and only programs put it together again."""

    weight_map: WeightMap

    def __init__(self, config: ArchitectureConfig, dtype: jnp.dtype) -> None: ...

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], pages: Pages, attend: Attend
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Final hidden states of packed tokens, and the pages with these tokens' keys and values in them."""
        ...

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """float32 scores over the vocabulary."""
        ...
