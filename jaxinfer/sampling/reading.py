"""A step's log-probabilities as the host reads them. Imports no JAX."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxinfer.request import TokenLogprob


class SampledOnHost(Protocol):
    """`sampler.Sampled` with NumPy arrays."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


def read_logprob(sampled: SampledOnHost, row: int, num_top: int) -> TokenLogprob:
    """The sampled token's of one row, with the `num_top` likeliest."""
    top = zip(sampled.top_tokens[row, :num_top].tolist(), sampled.top_logprobs[row, :num_top].tolist(), strict=True)
    return TokenLogprob(int(sampled.tokens[row]), float(sampled.logprobs[row]), tuple(top))
