"""SamplingParams of a batch's rows as padded NumPy arrays, the form that compiled programs take. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt32

from jaxinfer.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, SamplingParams

MAX_END_TOKENS = 8  # end-of-sequence tokens a model can have
MAX_BIASES = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + MAX_END_TOKENS
_FOREVER = np.iinfo(np.int32).max
_NOWHERE = np.iinfo(np.int32).max  # a token id that no vocabulary holds: dropped on the device


class SamplingRows(NamedTuple):
    """One row a sequence. They change only when a sequence joins or leaves, so runners keep them on the device between."""

    temperature: Float32[Any, " B"]  # 0: greedy
    top_k: Int32[Any, " B"]  # 0: off
    top_p: Float32[Any, " B"]
    min_p: Float32[Any, " B"]
    seed: UInt32[Any, "B 2"]
    repetition_penalty: Float32[Any, " B"]
    presence_penalty: Float32[Any, " B"]
    frequency_penalty: Float32[Any, " B"]
    bias_tokens: Int32[Any, "B MAX_BIASES"]
    bias_values: Float32[Any, "B MAX_BIASES"]
    bias_until: Int32[Any, "B MAX_BIASES"]  # the bias holds while fewer tokens than this were generated
    wants_logprobs: Bool[Any, " B"]


def neutral_rows(num_rows: int) -> SamplingRows:
    """Greedy rows with nothing switched on, as padding."""
    return SamplingRows(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.zeros((num_rows, 2), np.uint32),
        repetition_penalty=np.ones(num_rows, np.float32),
        presence_penalty=np.zeros(num_rows, np.float32),
        frequency_penalty=np.zeros(num_rows, np.float32),
        bias_tokens=np.full((num_rows, MAX_BIASES), _NOWHERE, np.int32),
        bias_values=np.zeros((num_rows, MAX_BIASES), np.float32),
        bias_until=np.zeros((num_rows, MAX_BIASES), np.int32),
        wants_logprobs=np.zeros(num_rows, bool),
    )


def set_row(rows: SamplingRows, row: int, params: SamplingParams, seed: int, end_tokens: Sequence[int]) -> None:
    """Fill one row. `seed` is the sequence's own; `end_tokens` are those that end it, held back until min_tokens."""
    rows.temperature[row] = params.temperature
    rows.top_k[row] = params.top_k
    rows.top_p[row] = params.top_p
    rows.min_p[row] = params.min_p
    rows.seed[row] = (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
    rows.repetition_penalty[row] = params.repetition_penalty
    rows.presence_penalty[row] = params.presence_penalty
    rows.frequency_penalty[row] = params.frequency_penalty
    rows.wants_logprobs[row] = params.logprobs is not None
    biases = [(token, bias, _FOREVER) for token, bias in params.logit_bias.items()]
    if params.min_tokens:
        biases += [(token, -np.inf, params.min_tokens) for token in end_tokens]
    for i, (token, value, until) in enumerate(biases):
        rows.bias_tokens[row, i], rows.bias_values[row, i], rows.bias_until[row, i] = token, value, until


def uses_penalties(params: SamplingParams) -> bool:
    """Whether the device must know which tokens the sequence holds."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
