"""Where the span of a query begins, for positions that are arrays: `Span.first` does the same for one number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.span import Span


def first_visible(span: Span, position: Int[Array, "*shape"]) -> Int[Array, "*shape"] | int:
    """The first position that a query at this position attends to; plain 0 for all of the context."""
    if span.window is not None:
        return jnp.maximum(position - (span.window - 1), 0)
    if span.chunk is not None:
        return jax.lax.div(position, jnp.int32(span.chunk)) * span.chunk
    return 0
