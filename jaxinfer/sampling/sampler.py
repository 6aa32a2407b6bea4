"""From logits to tokens on the device, each row by its own parameters.

Nothing is sorted. Top-k and top-p keep tokens above a threshold, which bisection over the floats' bits finds exactly.
One uniform number a row picks from the cumulative sum. What no row of a batch uses is skipped, except where it has
collectives. A vocabulary split over devices stays split: they exchange maxima, sums and candidates, never all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxinfer.layers.argmax import argmax_over_shards, first_place
from jaxinfer.layers.vocabulary import WHOLE, VocabShard, shard_over_vocab
from jaxinfer.request import MAX_TOP_LOGPROBS
from jaxinfer.sampling.params import SamplingRows, are_greedy, has_bias, has_penalty
from jaxinfer.sampling.penalties import penalize
from jaxinfer.sampling.token_counts import TokenCounts
from jaxinfer.structured.mask import masked
from pallas_kernels.mosaic.card import target_device

_LANES = 128  # the vocabulary is summed in blocks of this size


class Sampled(NamedTuple):
    """A step's result. Log-probabilities are the model's own; zeros if no row wants them.

    One array with named columns, on host and device: each array costs the host microseconds a call.
    """

    packed: Int[Any, "B 2+20+20"]

    @classmethod
    def of(
        cls, tokens: Int[Array, " B"], logprobs: Float[Array, " B"], top_tokens: Int[Array, "B 20"], top_logprobs: Float[Array, "B 20"]
    ) -> Sampled:
        """Pack on the device."""
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
    """A model's output head; see `models.base.CausalLM`."""

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]: ...

    def best(self, hidden: Float[Array, "X D"]) -> Int[Array, " X"]: ...


def sample(
    head: Head,
    hidden: Float[Array, "B D"],
    rows: SamplingRows | None,
    num_generated: Int[Array, " B"],
    counts: TokenCounts | None,
    slots: Int[Array, " B"],
    newest: Int[Array, " B"],
    mask: Int[Array, "B W"] | None = None,
    *,
    is_chosen_by_host: bool,
) -> Sampled:
    """One token a row from final hidden states, for both roles, on one device or several: `_best` if all rows are
    greedy, else `sample_from_logits`. `is_chosen_by_host`: `rows` and `counts` are given only if some row isn't greedy;
    otherwise the device checks that."""
    if rows is None:
        return _best(head, hidden)
    assert counts is not None
    others = partial(sample_from_logits, rows=rows, num_generated=num_generated, counts=counts, slots=slots, newest=newest, mask=mask)
    if is_chosen_by_host:
        return others(head.logits(hidden))
    return jax.lax.cond(are_greedy(rows, num_generated), lambda: _best(head, hidden), lambda: others(head.logits(hidden)))


def _best(head: Head, hidden: Float[Array, "B D"]) -> Sampled:
    """Greedy tokens from final hidden states, for rows that use nothing else (`params.are_greedy`): one pass over the
    logits, without a buffer of the vocabulary's size."""
    return Sampled.of(head.best(hidden), *_no_logprobs(*jax.eval_shape(head.logits, hidden).shape))


def sample_from_logits(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    num_generated: Int[Array, " B"],
    counts: TokenCounts,
    slots: Int[Array, " B"],
    newest: Int[Array, " B"],
    mask: Int[Array, "B W"] | None = None,
) -> Sampled:
    """One token a row. `num_generated`: tokens before it. Together with the seed it alone decides the random number, so
    a sequence's tokens depend neither on the rest of the batch nor on preemptions. `counts`: for penalties, by slot.
    `newest`: the row's previous token, on which a bias may depend. `mask`: see `structured.mask`."""
    return shard_over_vocab(
        _sample_on_shard, logits, 1, logits, rows, num_generated, counts, slots, newest, *(() if mask is None else (mask,))
    )


def _sample_on_shard(
    shard: VocabShard,
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    num_generated: Int[Array, " B"],
    counts: TokenCounts,
    slots: Int[Array, " B"],
    newest: Int[Array, " B"],
    mask: Int[Array, "B W"] | None = None,
) -> Sampled:
    scores = jax.lax.cond(has_penalty(rows).any(), lambda: penalize(logits, counts, slots, rows), lambda: logits)
    scores = jax.lax.cond(
        has_bias(rows, num_generated).any(), lambda: _add_biases(shard, scores, rows, num_generated, newest), lambda: scores
    )
    if mask is not None:
        scores = masked(shard, scores, mask)
    greedy = argmax_over_shards(shard, scores)

    def drawn() -> Int[Array, " B"]:
        return jnp.where(rows.temperature > 0, _draw(shard, scores, rows, num_generated), greedy)

    tokens = _where_asked(shard, jnp.any(rows.temperature > 0), drawn, lambda: greedy)
    return Sampled.of(tokens, *_logprobs_on_shard(shard, logits, tokens, jnp.any(rows.wants_logprobs > 0), rows))


def _where_asked(shard: VocabShard, is_asked: Bool[Array, ""], what: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """A branch that is skipped if no row of the batch uses it, on one device. A sharded vocabulary needs a collective
    in it, and a branch with a collective makes a GPU's host wait for all earlier work before the next launch. So there
    it is always computed."""
    return jax.lax.cond(is_asked, what, otherwise) if shard.is_whole else what()


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, "B 20"], Float[Array, "B 20"]]:
    """Log-probabilities of the tokens, and the likeliest tokens with theirs."""
    logprobs: tuple[Array, Array, Array] = shard_over_vocab(_logprobs_on_shard, logits, 1, logits, tokens, jnp.asarray(True))
    return logprobs


def _logprobs_on_shard(
    shard: VocabShard, logits: Float[Array, "B V"], tokens: Int[Array, " B"], wanted: Bool[Array, ""], rows: SamplingRows | None = None
) -> tuple[Float[Array, " B"], Int[Array, "B 20"], Float[Array, "B 20"]]:
    """Zeros unless `wanted`. Rows with listed tokens get those instead of the likeliest, in any order."""
    batch, size = logits.shape
    num_top = min(MAX_TOP_LOGPROBS, size)

    def on_shard() -> tuple[Array, Array, Array, Array]:
        # A shard without the token reads its last entry; the token's own shard is selected later.
        place = shard.places(tokens, size)
        chosen = jnp.take_along_axis(logits, place[:, None], axis=1, mode="clip")[:, 0]
        top, top_tokens = _highest(logits, num_top)
        if rows is not None:
            listed, is_listed = rows.listed_tokens[:, :num_top], rows.lists_tokens[:, None]
            places = shard.places(listed, size)
            # Tokens of other shards, and padding, get -inf here: the highest over shards are the real ones.
            scores = jnp.take_along_axis(logits, places, axis=1, mode="fill", fill_value=-jnp.inf)
            top, top_tokens = jnp.where(is_listed, scores, top), jnp.where(is_listed, listed - shard.first(size), top_tokens)
        return jax.nn.logsumexp(logits, axis=-1), chosen, top, top_tokens

    def relative(total: Array, chosen: Array, top: Array, top_tokens: Array) -> tuple[Array, Array, Array]:
        return chosen - total, top_tokens, top - total[:, None]

    none = partial(_no_logprobs, batch, size * shard.num_shards)
    if shard.is_whole:
        return jax.lax.cond(wanted, lambda: relative(*on_shard()), none)

    def packed() -> Int[Array, "B 42"]:
        total, chosen, top, top_tokens = on_shard()
        return jnp.concatenate([_bits(total)[:, None], _bits(chosen)[:, None], _bits(top), top_tokens + shard.first(size)], axis=1)

    # One all-gather for everything, outside both branches: see `_where_asked`.
    every = shard.all_gather(jax.lax.cond(wanted, packed, lambda: jnp.zeros((batch, 2 + 2 * num_top), jnp.int32)))

    def of_all() -> tuple[Array, Array, Array]:
        totals, of_parts, top, top_tokens = jnp.split(every, (1, 2, 2 + num_top), axis=2)
        total = jax.nn.logsumexp(_floats(totals[..., 0]), axis=0)
        chosen = jnp.take_along_axis(_floats(of_parts[..., 0]), (tokens // size)[None], axis=0, mode="clip")[0]
        top, top_tokens = (jnp.swapaxes(of_parts, 0, 1).reshape(batch, -1) for of_parts in (_floats(top), top_tokens))
        top, highest = _highest(top, min(MAX_TOP_LOGPROBS, size * shard.num_shards))
        return relative(total, chosen, top, jnp.take_along_axis(top_tokens, highest, axis=1, mode="promise_in_bounds"))

    return jax.lax.cond(wanted, of_all, none)


def _highest(x: Float[Array, "B X"], number: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """The largest values of each row, descending, and their indices; ties by index."""
    if target_device().platform == "cpu":
        highest: tuple[Array, Array] = jax.lax.top_k(x, number)
        return highest
    # One by one: for top_k XLA makes a GPU sort whole rows, by a library call that fits no CUDA graph.
    size = x.shape[1]
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), x.shape)

    def higher(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        is_a = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(is_a, a[0], b[0]), jnp.where(is_a, a[1], b[1])

    found = [(jnp.full(len(x), jnp.inf), jnp.full(len(x), -1, jnp.int32))]
    for _ in range(number):
        value, at = (last[:, None] for last in found[-1])
        is_left = (x < value) | ((x == value) & (place > at))
        left = jnp.where(is_left, x, -jnp.inf), jnp.where(is_left, place, size)
        value, at = jax.lax.reduce(left, (np.float32(-np.inf), np.int32(size)), higher, (1,))
        found.append((value, jnp.minimum(at, size - 1)))  # a row of NaNs has no candidate left
    values, places = zip(*found[1:], strict=True)
    return jnp.stack(values, axis=1), jnp.stack(places, axis=1)


def _no_logprobs(batch: int, vocab_size: int) -> tuple[Array, Array, Array]:
    num_top = min(MAX_TOP_LOGPROBS, vocab_size)
    return jnp.zeros(batch), jnp.zeros((batch, num_top), jnp.int32), jnp.zeros((batch, num_top))


def _add_biases(
    shard: VocabShard, scores: Float[Array, "B V"], rows: SamplingRows, num_generated: Int[Array, " B"], newest: Int[Array, " B"]
) -> Float[Array, "B V"]:
    holds = (rows.bias_until > num_generated[:, None]) | (rows.bias_until == -1 - newest[:, None])
    values = jnp.where(holds, rows.bias_values, 0.0)
    at = jnp.arange(scores.shape[0])[:, None], shard.places(rows.bias_tokens, scores.shape[1])
    biased = scores.at[at].add(values, mode="drop")
    is_restricted = rows.is_restricted[:, None] > 0

    def restricted() -> Float[Array, "B V"]:
        is_allowed = jnp.zeros(scores.shape, bool).at[at].set(True, mode="drop")
        return jnp.where(is_allowed | ~is_restricted, biased, -jnp.inf)

    return jax.lax.cond(is_restricted.any(), restricted, lambda: biased)


def _draw(shard: VocabShard, scores: Float[Array, "B V"], rows: SamplingRows, num_generated: Int[Array, " B"]) -> Int[Array, " B"]:
    # The maximum is subtracted first, so that no temperature, however low, makes it infinite.
    temperature = jnp.maximum(jnp.where(rows.temperature > 0, rows.temperature, 1.0), jnp.finfo(jnp.float32).tiny)
    scaled = (scores - shard.all_max(jnp.max(scores, axis=1, keepdims=True))) / temperature[:, None]
    weights = jnp.where(scaled >= jnp.log(rows.min_p)[:, None], jnp.exp(scaled), 0.0)
    order = _ordered_bits(scaled)

    def with_top_k() -> Float[Array, "B V"]:
        least = _threshold(shard, order, jnp.ones_like(weights), rows.top_k.astype(jnp.float32))
        return jnp.where((rows.top_k[:, None] == 0) | (order >= least[:, None]), weights, 0.0)

    weights = _where_asked(shard, jnp.any(rows.top_k > 0), with_top_k, lambda: weights)

    def with_top_p() -> Float[Array, "B V"]:
        least = _threshold(shard, order, weights, rows.top_p * shard.all_sum(jnp.sum(weights, axis=1)))
        return jnp.where((rows.top_p[:, None] >= 1) | (order >= least[:, None]), weights, 0.0)

    weights = _where_asked(shard, jnp.any(rows.top_p < 1), with_top_p, lambda: weights)
    return pick(weights, _uniform(rows.seed, num_generated), shard)


def _ordered_bits(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(shard: VocabShard, order: UInt[Array, "B V"], weights: Float[Array, "B V"], enough: Float[Array, " B"]) -> UInt[Array, " B"]:
    """For each row the largest t such that the weights with order >= t sum to at least `enough`, a few bits at a
    time."""
    # A CPU pays for each comparison, shards for each reduction, a GPU for each launch. Loops are unrolled for GPUs: XLA
    # makes no CUDA graph of a loop, and the host would have to wait for it before it launches the rest of the step.
    is_cpu = target_device().platform == "cpu"
    num_bits = 1 if shard.is_whole and is_cpu else 4
    digits = jnp.arange(1, 1 << num_bits, dtype=jnp.uint32)

    def one_digit(i: Int[Array, ""], found: UInt[Array, " B"]) -> UInt[Array, " B"]:
        shift = (32 - num_bits * (i + 1)).astype(jnp.uint32)
        tried = found[:, None] | (digits << shift)
        mass = shard.all_sum(jnp.sum(jnp.where(order[:, None] >= tried[:, :, None], weights[:, None], 0.0), axis=2))
        # The sums decrease, in floats too if all are added in one order: the digit is how many sums are enough.
        return found | (jnp.sum(mass >= enough[:, None], axis=1, dtype=jnp.uint32) << shift)

    return jax.lax.fori_loop(0, 32 // num_bits, one_digit, jnp.zeros(order.shape[0], jnp.uint32), unroll=not is_cpu)


def _uniform(seed: UInt[Array, "B 2"], num_generated: Int[Array, " B"]) -> Float[Array, " B"]:
    """A number in [0, 1) for each row: Threefry with the seed as key and the count as input (Random123, SC'11)."""

    def of_row(seed: UInt[Array, " 2"], count: Int[Array, ""]) -> UInt[Array, ""]:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), count))[0]

    return (jax.vmap(of_row)(seed, num_generated) >> 8).astype(jnp.float32) * 2**-24


def pick(weights: Float[Array, "B V"], uniform: Float[Array, " B"], shard: VocabShard = WHOLE) -> Int[Array, " B"]:
    """The index in each row where the cumulative weight exceeds uniform * total, with non-zero weight: first the shard,
    then the block of lanes, then the lane."""
    batch, size = weights.shape
    lanes = jnp.pad(weights, ((0, 0), (0, -size % _LANES))).reshape(batch, -1, _LANES)
    runs = lanes.sum(axis=2)
    up_to = jnp.cumsum(runs, axis=1)
    last = size - 1  # a model that overflowed has NaNs only: still returns a token, and none of the padding
    if shard.is_whole:
        return jnp.minimum(_pick_in_runs(lanes, runs, up_to, uniform * up_to[:, -1]), last)
    parts = shard.all_gather(up_to[:, -1]).T
    up_to_part = jnp.cumsum(parts, axis=1)
    target = uniform * up_to_part[:, -1]
    hit, before = _narrowed(parts, up_to_part, target)
    # Every shard searches; the one that was hit counts.
    places = shard.first(size) + jnp.minimum(_pick_in_runs(lanes, runs, up_to, target - before), last)
    return jnp.take_along_axis(shard.all_gather(places), hit[None], axis=0, mode="promise_in_bounds")[0]


def _pick_in_runs(
    lanes: Float[Array, "B R X"], runs: Float[Array, "B R"], up_to: Float[Array, "B R"], target: Float[Array, " B"]
) -> Int[Array, " B"]:
    run, before = _narrowed(runs, up_to, target)
    lanes = jnp.take_along_axis(lanes, run[:, None, None], axis=1, mode="promise_in_bounds")[:, 0]
    return run * _LANES + _first_above(lanes, jnp.cumsum(lanes, axis=1), target - before)


def _narrowed(
    parts: Float[Array, "B X"], up_to: Float[Array, "B X"], target: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The part in which the cumulative sum exceeds the target, and the sum before it."""
    place = _first_above(parts, up_to, target)
    is_before = jnp.arange(up_to.shape[1]) == place[:, None] - 1
    return place, jnp.where(is_before, up_to, 0.0).sum(axis=1)


def _first_above(parts: Float[Array, "B X"], up_to: Float[Array, "B X"], target: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first index with non-zero weight where the sum exceeds the target; if rounding leaves none, the maximum's.

    A parallel cumulative sum is not quite monotone, so an index of zero weight could seem to exceed the target."""
    reached = jnp.where(parts > 0, up_to, 0.0)
    almost_most = _floats(jnp.maximum(_bits(reached.max(axis=1)), 1) - 1)  # the next lower float
    return first_place(reached > jnp.minimum(target, almost_most)[:, None], axis=1)


def _bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _floats(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
