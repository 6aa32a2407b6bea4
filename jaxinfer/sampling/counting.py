"""Counts of a sequence's tokens on the device, for its penalties; and the program that counts one anew when it joins a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Int

from jaxinfer.runtime.compilation import ProgramSource, abstract_like
from sharding.partition import replicated


class TokenCounts(NamedTuple):
    """Per slot: which tokens the prompt holds, and how often each was generated. Kept only for slots that use penalties."""

    prompt: Bool[Any, "S V"]
    output: Int[Any, "S V"]


def reset(
    counts: TokenCounts, slot: Int[Array, ""], tokens: Int[Array, " C"], num_prompt: Int[Array, ""], num_tokens: Int[Array, ""]
) -> TokenCounts:
    """Count a sequence anew: `tokens` is padded, its first `num_prompt` are the prompt, those up to `num_tokens` were generated."""
    vocab_size = counts.prompt.shape[1]
    place = jnp.arange(tokens.shape[0])
    prompt = jnp.zeros(vocab_size, bool).at[tokens].max(place < num_prompt, mode="drop")
    was_generated = (place >= num_prompt) & (place < num_tokens)
    output = jnp.zeros(vocab_size, jnp.int32).at[tokens].add(was_generated.astype(jnp.int32), mode="drop")
    return TokenCounts(counts.prompt.at[slot].set(prompt), counts.output.at[slot].set(output))


def abstract_counts(num_slots: int, vocab_size: int, sharding: NamedSharding) -> TokenCounts:
    """Shapes of the counts of that many slots."""
    shape = (num_slots, vocab_size)
    return TokenCounts(jax.ShapeDtypeStruct(shape, bool, sharding=sharding), jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding))


def reset_program(name: str, counts: TokenCounts, max_model_len: int, mesh: Mesh) -> ProgramSource:
    """Counts one slot's tokens anew, on either mesh."""
    arguments = abstract_like(reset_arguments(0, (), 0, max_model_len), replicated(mesh))
    return ProgramSource(name, reset, (counts, *arguments), mesh, donated=(0,))


def reset_arguments(slot: int, token_ids: Sequence[int], num_prompt: int, max_model_len: int) -> tuple[np.ndarray, ...]:
    """The reset program's arguments after the counts."""
    padded = np.zeros(max_model_len, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(slot, np.int32), padded, np.asarray(num_prompt, np.int32), np.asarray(len(token_ids), np.int32)
