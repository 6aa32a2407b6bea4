"""Which cached tokens a query attends to, besides coming after them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclass(frozen=True)
class Span:
    """All of the context, a sliding window over it (Mistral, Gemma) or the query's own chunk of it (Llama 4). At most one is given."""

    window: int | None = None  # the token itself and the window - 1 before it
    chunk: int | None = None  # those of its own run of this many tokens, counted from the context's start

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"a span is a window ({self.window}) or a chunk ({self.chunk}), not both")
        for name in ("window", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}: it must be at least 1")

    def first(self, position: Int[Array, "*shape"]) -> Int[Array, "*shape"] | int:
        """The first position that a query at this one attends to, 0 for all of the context; those between the two are attended to as well."""
        if self.window is not None:
            return jnp.maximum(position - (self.window - 1), 0)
        if self.chunk is not None:
            return jax.lax.div(position, jnp.int32(self.chunk)) * self.chunk
        return 0


EVERYTHING = Span()
