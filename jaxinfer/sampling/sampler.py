"""From logits to tokens, on the device, each row by its own parameters.

Nothing is sorted: top-k and top-p keep what lies above a threshold that 32 passes of bisection over the floats' bits find
exactly, and one uniform number a row picks from the cumulative sum. What no row of a batch asks for is skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxinfer.layers.argmax import argmax_of_rows
from jaxinfer.request import MAX_TOP_LOGPROBS
from jaxinfer.sampling.counting import TokenCounts
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.penalties import any_penalty, penalize

_LANES = 128  # the vocabulary is summed in runs of this many


class Sampled(NamedTuple):
    """A step's result. Log-probabilities are the model's own; they are zeros when no row wants them.

    All in one array, whose columns have names here, on the host and on the device alike: each array costs the host microseconds a call.
    """

    packed: Int[Any, "B 2+20+20"]

    @classmethod
    def of(
        cls, tokens: Int[Array, " B"], logprobs: Float[Array, " B"], top_tokens: Int[Array, "B 20"], top_logprobs: Float[Array, "B 20"]
    ) -> Sampled:
        """Packed on the device."""
        columns = (tokens[:, None], logprobs[:, None].view(jnp.int32), top_tokens, top_logprobs.view(jnp.int32))
        return cls(jnp.concatenate(columns, axis=1))

    @property
    def tokens(self) -> Int[Any, " B"]:
        return self.packed[:, 0]

    @property
    def logprobs(self) -> Float[Any, " B"]:
        return self.packed[:, 1].view(np.float32)

    @property
    def top_tokens(self) -> Int[Any, "B 20"]:
        return self.packed[:, 2 : self._end_of_tokens]

    @property
    def top_logprobs(self) -> Float[Any, "B 20"]:
        return self.packed[:, self._end_of_tokens :].view(np.float32)

    @property
    def _end_of_tokens(self) -> int:
        return 1 + int(self.packed.shape[1]) // 2


class Head(Protocol):
    """A model's output head, as `models.base.CausalLM` has it."""

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]: ...

    def best(self, hidden: Float[Array, "X D"]) -> Int[Array, " X"]: ...


def sample(
    head: Head,
    hidden: Float[Array, "B D"],
    rows: SamplingRows,
    num_generated: Int[Array, " B"],
    counts: TokenCounts,
    slots: Int[Array, " B"],
) -> Sampled:
    """One token a row from final hidden states. Rows that are all greedy and ask for nothing more take one pass over the scores, and
    no buffer of the vocabulary's size; otherwise see `sample_from_logits`."""
    has_bias = jnp.any(rows.bias_until > num_generated[:, None])
    is_plain = ~(jnp.any(rows.temperature > 0) | any_penalty(rows) | has_bias | jnp.any(rows.wants_logprobs > 0))

    def plain() -> Sampled:
        return Sampled.of(head.best(hidden), *_no_logprobs(*jax.eval_shape(head.logits, hidden).shape))

    return jax.lax.cond(is_plain, plain, lambda: sample_from_logits(head.logits(hidden), rows, num_generated, counts, slots))


def sample_from_logits(
    logits: Float[Array, "B V"], rows: SamplingRows, num_generated: Int[Array, " B"], counts: TokenCounts, slots: Int[Array, " B"]
) -> Sampled:
    """One token a row. `num_generated` tokens came before it: with the seed it alone decides the random draw, so a sequence's
    tokens do not depend on what else is in the batch, nor on having been preempted. Penalties are by the counts of each row's slot."""
    scores = jax.lax.cond(any_penalty(rows), lambda: penalize(logits, counts, slots, rows), lambda: logits)
    has_bias = jnp.any(rows.bias_until > num_generated[:, None])
    scores = jax.lax.cond(has_bias, lambda: _add_biases(scores, rows, num_generated), lambda: scores)
    greedy = argmax_of_rows(scores)
    tokens = jax.lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _draw(scores, rows, num_generated), greedy),
        lambda: greedy,
    )
    return Sampled.of(tokens, *token_logprobs(logits, tokens, jnp.any(rows.wants_logprobs > 0)))


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], wanted: Bool[Array, ""]
) -> tuple[Float[Array, " B"], Int[Array, "B 20"], Float[Array, "B 20"]]:
    """The tokens' log-probabilities, and the likeliest tokens with theirs; zeros unless `wanted`."""

    def computed() -> tuple[Array, Array, Array]:
        total = jax.nn.logsumexp(logits, axis=-1)
        top, top_tokens = jax.lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")[:, 0]
        return chosen - total, top_tokens, top - total[:, None]

    return jax.lax.cond(wanted, computed, lambda: _no_logprobs(*logits.shape))


def _no_logprobs(batch: int, vocab_size: int) -> tuple[Array, Array, Array]:
    num_top = min(MAX_TOP_LOGPROBS, vocab_size)
    return jnp.zeros(batch), jnp.zeros((batch, num_top), jnp.int32), jnp.zeros((batch, num_top))


def _add_biases(scores: Float[Array, "B V"], rows: SamplingRows, num_generated: Int[Array, " B"]) -> Float[Array, "B V"]:
    values = jnp.where(rows.bias_until > num_generated[:, None], rows.bias_values, 0.0)
    return scores.at[jnp.arange(scores.shape[0])[:, None], rows.bias_tokens].add(values, mode="drop")


def _draw(scores: Float[Array, "B V"], rows: SamplingRows, num_generated: Int[Array, " B"]) -> Int[Array, " B"]:
    # The best becomes 0 before the division, so that no temperature, however low, makes it infinite.
    temperature = jnp.maximum(jnp.where(rows.temperature > 0, rows.temperature, 1.0), jnp.finfo(jnp.float32).tiny)
    scaled = (scores - jnp.max(scores, axis=1, keepdims=True)) / temperature[:, None]
    weights = jnp.where(scaled >= jnp.log(rows.min_p)[:, None], jnp.exp(scaled), 0.0)
    order = _ordered_bits(scaled)

    def with_top_k() -> Float[Array, "B V"]:
        least = _threshold(order, jnp.ones_like(weights), rows.top_k.astype(jnp.float32))
        return jnp.where((rows.top_k[:, None] == 0) | (order >= least[:, None]), weights, 0.0)

    weights = jax.lax.cond(jnp.any(rows.top_k > 0), with_top_k, lambda: weights)

    def with_top_p() -> Float[Array, "B V"]:
        least = _threshold(order, weights, rows.top_p * jnp.sum(weights, axis=1))
        return jnp.where((rows.top_p[:, None] >= 1) | (order >= least[:, None]), weights, 0.0)

    weights = jax.lax.cond(jnp.any(rows.top_p < 1), with_top_p, lambda: weights)
    return pick(weights, _uniform(rows.seed, num_generated))


def _ordered_bits(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Unsigned integers in the same order as the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: UInt[Array, "B V"], weights: Float[Array, "B V"], enough: Float[Array, " B"]) -> UInt[Array, " B"]:
    """Of each row the largest t such that the weights of places with order >= t sum to at least `enough`, bit by bit."""

    def one_bit(i: Int[Array, ""], found: UInt[Array, " B"]) -> UInt[Array, " B"]:
        tried = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(order >= tried[:, None], weights, 0.0), axis=1)
        return jnp.where(mass >= enough, tried, found)

    return jax.lax.fori_loop(0, 32, one_bit, jnp.zeros(order.shape[0], jnp.uint32))


def _uniform(seed: UInt[Array, "B 2"], num_generated: Int[Array, " B"]) -> Float[Array, " B"]:
    """One number in [0, 1) a row."""

    def of_row(seed: UInt[Array, " 2"], count: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), count))

    return jax.vmap(of_row)(seed, num_generated)


def pick(weights: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The place at which each row's cumulative weight passes uniform * total, one whose weight is not 0: first the run of lanes,
    then the lane."""
    batch, vocab_size = weights.shape
    lanes = jnp.pad(weights, ((0, 0), (0, -vocab_size % _LANES))).reshape(batch, -1, _LANES)
    runs = lanes.sum(axis=2)
    up_to = jnp.cumsum(runs, axis=1)
    target = uniform * up_to[:, -1]
    run = _first_above(runs, up_to, target)
    before = jnp.where(run > 0, jnp.take_along_axis(up_to, jnp.maximum(run - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    lanes = jnp.take_along_axis(lanes, run[:, None, None], axis=1)[:, 0]
    return run * _LANES + _first_above(lanes, jnp.cumsum(lanes, axis=1), target - before)


def _first_above(parts: Float[Array, "B X"], up_to: Float[Array, "B X"], target: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first place that adds something and brings the sum over the target; if rounding left none, where it is highest.

    A sum in parallel is not quite monotone, so a place that adds nothing could seem to bring it over the target."""
    reached = jnp.where(parts > 0, up_to, 0.0)
    most = jnp.nextafter(jnp.max(reached, axis=1), 0.0)
    return argmax_of_rows((reached > jnp.minimum(target, most)[:, None]).astype(jnp.float32))
