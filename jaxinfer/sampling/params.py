"""SamplingParams of a batch's rows as padded NumPy arrays, for compiled programs. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt32

from jaxinfer.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, SamplingParams
from jaxinfer.sampling.bad_words import Ban

MAX_END_TOKENS = 8  # the most end-of-sequence tokens of a model
MAX_BIASES = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + MAX_END_TOKENS
_FOREVER = np.iinfo(np.int32).max
_BANNED = -1e30  # bias of a bad word: below all other tokens, above those that are not allowed
_NOWHERE = np.iinfo(np.int32).max  # a token id outside every vocabulary: the device drops it


# Least temperature and top_p: below it only the best token has weight anyway, and devices flush subnormal floats to 0.
_LEAST = 1e-30

_COLUMNS = (
    *("temperature", "top_k", "top_p", "min_p", "seed_high", "seed_low"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "wants_logprobs", "is_restricted"),
)
_AT = {name: place for place, name in enumerate(_COLUMNS)}
_FIRST_LISTED = len(_COLUMNS)
_FIRST_BIAS = _FIRST_LISTED + MAX_TOP_LOGPROBS
_LIKELIEST, _LISTED = 1, 2  # tokens whose log-probabilities are wanted besides the sampled one's


class SamplingRows(NamedTuple):
    """One row a sequence. Rows change only when a sequence joins or leaves, so runners keep them on the device.

    One array with named columns, on host and device: each array costs the host microseconds a call.
    """

    packed: Int32[Any, "B X"]

    @property
    def temperature(self) -> Float32[Any, " B"]:
        """0: greedy."""
        return self._float("temperature")

    @property
    def top_k(self) -> Int32[Any, " B"]:
        """0: off."""
        return self.packed[:, _AT["top_k"]]

    @property
    def top_p(self) -> Float32[Any, " B"]:
        return self._float("top_p")

    @property
    def min_p(self) -> Float32[Any, " B"]:
        return self._float("min_p")

    @property
    def seed(self) -> UInt32[Any, "B 2"]:
        return self.packed[:, _AT["seed_high"] : _AT["seed_low"] + 1].view(np.uint32)

    @property
    def repetition_penalty(self) -> Float32[Any, " B"]:
        return self._float("repetition_penalty")

    @property
    def presence_penalty(self) -> Float32[Any, " B"]:
        return self._float("presence_penalty")

    @property
    def frequency_penalty(self) -> Float32[Any, " B"]:
        return self._float("frequency_penalty")

    @property
    def wants_logprobs(self) -> Int32[Any, " B"]:
        """Above 0 where log-probabilities are wanted."""
        return self.packed[:, _AT["wants_logprobs"]]

    @property
    def lists_tokens(self) -> Bool[Any, " B"]:
        """Where they are wanted for `listed_tokens` instead of the likeliest."""
        return self.wants_logprobs == _LISTED

    @property
    def listed_tokens(self) -> Int32[Any, "B 20"]:
        return self.packed[:, _FIRST_LISTED:_FIRST_BIAS]

    @property
    def is_restricted(self) -> Int32[Any, " B"]:
        """1 where only tokens with a bias may be sampled, else 0."""
        return self.packed[:, _AT["is_restricted"]]

    @property
    def bias_tokens(self) -> Int32[Any, "B MAX_BIASES"]:
        return self._biases(0)

    @property
    def bias_values(self) -> Float32[Any, "B MAX_BIASES"]:
        return self._biases(1).view(np.float32)

    @property
    def bias_until(self) -> Int32[Any, "B MAX_BIASES"]:
        """A bias applies while fewer tokens than this were generated; a negative one, -1 - t, only after token t."""
        return self._biases(2)

    def _float(self, name: str) -> Float32[Any, " B"]:
        return self.packed[:, _AT[name]].view(np.float32)

    def _biases(self, number: int) -> Int32[Any, "B MAX_BIASES"]:
        start = _FIRST_BIAS + number * MAX_BIASES
        return self.packed[:, start : start + MAX_BIASES]


def neutral_rows(num_rows: int) -> SamplingRows:
    """Greedy rows with everything off; also used as padding."""
    rows = SamplingRows(np.zeros((num_rows, _FIRST_BIAS + 3 * MAX_BIASES), np.int32))
    rows.top_p[:] = 1.0
    rows.repetition_penalty[:] = 1.0
    rows.bias_tokens[:] = _NOWHERE
    rows.listed_tokens[:] = _NOWHERE
    return rows


_NEUTRAL_ROW = neutral_rows(1).packed[0]


def set_row(rows: SamplingRows, row: int, params: SamplingParams, seed: int, end_tokens: Sequence[int], bans: Sequence[Ban] = ()) -> None:
    """Fill one row. `seed`: the sequence's own. `end_tokens`: end the sequence, and are banned until min_tokens.
    `bans`: from its bad words."""
    rows.packed[row] = _NEUTRAL_ROW
    rows.temperature[row] = max(params.temperature, _LEAST) if params.temperature else 0.0
    rows.top_k[row] = params.top_k
    rows.top_p[row] = max(params.top_p, _LEAST)
    rows.min_p[row] = params.min_p
    rows.seed[row] = (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
    rows.repetition_penalty[row] = params.repetition_penalty
    rows.presence_penalty[row] = params.presence_penalty
    rows.frequency_penalty[row] = params.frequency_penalty
    if params.logprobs is not None:
        rows.wants_logprobs[row] = _LISTED if params.logprob_token_ids else _LIKELIEST
        rows.listed_tokens[row, : len(params.logprob_token_ids)] = params.logprob_token_ids
    biases = [(token, bias, _FOREVER) for token, bias in params.logit_bias.items()]
    if params.min_tokens:
        biases += [(token, -np.inf, params.min_tokens) for token in end_tokens]
    biases += [(token, _BANNED, _FOREVER if after is None else -1 - after) for token, after in bans]
    if params.allowed_token_ids is not None:
        rows.is_restricted[row] = 1
        allowed = {token: (token, 0.0, _FOREVER) for token in params.allowed_token_ids}
        biases = [*allowed.values(), *(bias for bias in biases if bias[0] in allowed)]
    for i, (token, value, until) in enumerate(biases):
        rows.bias_tokens[row, i], rows.bias_values[row, i], rows.bias_until[row, i] = token, value, until


def are_greedy(rows: SamplingRows, num_generated: Int32[Any, " B"]) -> Any:
    """Whether all rows are greedy and use nothing else, now and later. Runs on host and device, as do the next two."""
    return ~((rows.temperature > 0) | has_penalty(rows) | has_bias(rows, num_generated) | (rows.wants_logprobs > 0)).any()


def has_penalty(rows: SamplingRows) -> Bool[Any, " B"]:
    """Which rows use penalties."""
    return (rows.repetition_penalty != 1.0) | (rows.presence_penalty != 0.0) | (rows.frequency_penalty != 0.0)


def has_bias(rows: SamplingRows, num_generated: Int32[Any, " B"]) -> Bool[Any, " B"]:
    """Which rows have a bias that applies now, or one that depends on the newest token."""
    return ((rows.bias_until > num_generated[:, None]) | (rows.bias_until < 0)).any(axis=1)


def uses_penalties(params: SamplingParams) -> bool:
    """Whether the device must count the sequence's tokens."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
