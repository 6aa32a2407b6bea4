"""DecodeState: what stays on a stage's devices between steps of a micro-batch: one pytree, donated to programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxinfer.pipeline.stage import Stage
from jaxinfer.sampling.token_counts import TokenCounts, abstract_counts
from sharding.partition import place, replicated


class DecodeState(NamedTuple):
    """The state of S slots, and one more for padding. A field is None where a stage or a program doesn't use it: each
    array costs the host microseconds a call."""

    page_table: Int[Any, "S+1 W"] | None = None  # on every stage
    tokens: Int[Any, " S+1"] | None = None  # sampled last; on the last stage
    counts: TokenCounts | None = None  # for penalties; on the last stage

    @property
    def of_layers(self) -> DecodeState:
        """The part that the forward pass changes."""
        return DecodeState(page_table=self.page_table)

    @property
    def of_best_token(self) -> DecodeState:
        """The part that greedy sampling changes."""
        return DecodeState(tokens=self.tokens)

    @property
    def of_sampling(self) -> DecodeState:
        """The part that sampling by parameters changes."""
        return DecodeState(tokens=self.tokens, counts=self.counts)


def abstract_state(stage: Stage, num_slots: int, table_width: int, *, is_last: bool) -> DecodeState:
    """Shapes of a stage's state."""
    on_mesh = replicated(stage.mesh)
    table = jax.ShapeDtypeStruct((num_slots + 1, table_width), np.int32, sharding=on_mesh)
    if not is_last:
        return DecodeState(table)
    tokens = jax.ShapeDtypeStruct((num_slots + 1,), np.int32, sharding=on_mesh)
    return DecodeState(table, tokens, abstract_counts(num_slots + 1, stage.template.config.vocab_size, stage.mesh, stage.rules))


def empty_state(abstract: DecodeState) -> DecodeState:
    """Zeros of these shapes, on their devices."""
    state: DecodeState = jax.tree.map(lambda a: place(np.zeros(a.shape, a.dtype), a.sharding), abstract)
    return state
