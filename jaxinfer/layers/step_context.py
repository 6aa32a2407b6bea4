"""StepContext: what the rows of a step bring for the products of linear layers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class StepContext(NamedTuple):
    """An array for each row, or for each token once a program has laid them out so (`for_tokens`). A field is None
    where no row brings any: programs that are given an empty context are those that know of none."""

    adapters: Int[Array, " T"] | None = None  # which of a weight format's adapters each row uses; -1: none

    @property
    def is_empty(self) -> bool:
        return all(field is None for field in self)

    def for_tokens(self, row: Int[Array, " T"]) -> StepContext:
        """Of rows as of tokens, each of which belongs to one of them."""
        context: StepContext = jax.tree.map(lambda of_rows: of_rows[row], self)
        return context

    def repeated(self, num_tokens: int) -> StepContext:
        """Of rows as of tokens, of which each row has so many."""
        context: StepContext = jax.tree.map(lambda of_rows: jnp.repeat(of_rows, num_tokens, axis=0), self)
        return context


NO_CONTEXT = StepContext()
