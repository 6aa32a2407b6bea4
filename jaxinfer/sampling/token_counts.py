"""Token counts of sequences on the device, for penalties; and the program that counts a joining sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jaxinfer.layers.vocabulary import VocabShard, shard_over_vocab, specs
from jaxinfer.programs.compilation import ProgramSource, abstract_like
from sharding.partition import named_sharding, replicated
from sharding.rules import Rules


class TokenCounts(NamedTuple):
    """For each slot, which tokens are in the prompt and how often each was generated. Valid for slots with penalties
    only."""

    prompt: Bool[Any, "S V"]
    output: Int[Any, "S V"]


def reset(
    counts: TokenCounts, slot: Int[Array, ""], tokens: Int[Array, " C"], num_prompt: Int[Array, ""], num_tokens: Int[Array, ""]
) -> TokenCounts:
    """Recount a slot. `tokens` is padded: the first `num_prompt` are the prompt, those up to `num_tokens` the
    output."""
    arguments = (counts, slot, tokens, num_prompt, num_tokens)
    return shard_over_vocab(_reset, counts.prompt, 1, *arguments, out_specs=specs(counts))


def _reset(
    part: VocabShard,
    counts: TokenCounts,
    slot: Int[Array, ""],
    tokens: Int[Array, " C"],
    num_prompt: Int[Array, ""],
    num_tokens: Int[Array, ""],
) -> TokenCounts:
    size = counts.prompt.shape[1]
    place, of_part = jnp.arange(tokens.shape[0]), part.places(tokens, size)
    prompt = jnp.zeros(size, bool).at[of_part].max(place < num_prompt, mode="drop")
    was_generated = (place >= num_prompt) & (place < num_tokens)
    output = jnp.zeros(size, jnp.int32).at[of_part].add(was_generated.astype(jnp.int32), mode="drop")
    return TokenCounts(counts.prompt.at[slot].set(prompt), counts.output.at[slot].set(output))


def abstract_counts(num_slots: int, vocab_size: int, mesh: Mesh, rules: Rules) -> TokenCounts:
    """Shapes of the counts, split over devices as logits are."""
    shape = (num_slots, vocab_size)
    sharding = replicated(mesh) if mesh.size == 1 else named_sharding(mesh, rules, (None, "vocab"), shape, "token counts")
    return TokenCounts(jax.ShapeDtypeStruct(shape, bool, sharding=sharding), jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding))


def reset_program(name: str, counts: TokenCounts, max_model_len: int, mesh: Mesh) -> ProgramSource:
    """The program that recounts one slot, on either mesh."""
    arguments = abstract_like(reset_arguments(0, (), 0, max_model_len), replicated(mesh))
    return ProgramSource(name, reset, (counts, *arguments), mesh, donated=(0,))


def reset_arguments(slot: int, token_ids: Sequence[int], num_prompt: int, max_model_len: int) -> tuple[np.ndarray, ...]:
    """The reset program's arguments after the counts."""
    padded = np.zeros(max_model_len, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(slot, np.int32), padded, np.asarray(num_prompt, np.int32), np.asarray(len(token_ids), np.int32)
