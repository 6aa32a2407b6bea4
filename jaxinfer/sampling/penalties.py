"""Repetition, presence and frequency penalties, from counts of tokens kept on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.sampling.counting import TokenCounts
from jaxinfer.sampling.params import SamplingRows


def penalize(logits: Float[Array, "B V"], counts: TokenCounts, rows: SamplingRows) -> Float[Array, "B V"]:
    """Logits with the penalties of each row; `counts` are these rows' own."""
    generated = counts.output > 0
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts.prompt | generated, repeated, logits)
    times, once = counts.output.astype(logits.dtype), generated.astype(logits.dtype)
    return logits - rows.frequency_penalty[:, None] * times - rows.presence_penalty[:, None] * once


def any_penalty(rows: SamplingRows) -> Bool[Array, ""]:
    """Whether any row uses penalties at all."""
    return jnp.any((rows.repetition_penalty != 1.0) | (rows.presence_penalty != 0.0) | (rows.frequency_penalty != 0.0))


def add_sampled(counts: TokenCounts, slots: Int[Array, " B"], tokens: Int[Array, " B"], rows: SamplingRows) -> TokenCounts:
    """Count the step's tokens, if any row uses penalties."""

    def added(output: Int[Array, "S V"]) -> Int[Array, "S V"]:
        return output.at[slots, tokens].add(1, mode="drop")

    return counts._replace(output=jax.lax.cond(any_penalty(rows), added, lambda output: output, counts.output))
