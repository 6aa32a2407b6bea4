"""A step's log-probabilities, read on the host."""

from __future__ import annotations

import math

from jaxinfer.request import SamplingParams, TokenLogprob
from jaxinfer.sampling.sampler import Sampled


def read_logprob(sampled: Sampled, row: int, params: SamplingParams) -> TokenLogprob:
    """The sampled token's in one row, with those of the likeliest tokens, or of the tokens that `params` lists."""
    assert params.logprobs is not None
    num_read = None if params.logprob_token_ids else params.logprobs
    top = tuple(zip(sampled.top_tokens[row, :num_read].tolist(), sampled.top_logprobs[row, :num_read].tolist(), strict=True))
    if params.logprob_token_ids:
        found = dict(reversed(top))  # padding repeats tokens: the first occurrence counts
        top = tuple((token, found.get(token, -math.inf)) for token in params.logprob_token_ids)
    return TokenLogprob(int(sampled.tokens[row]), float(sampled.logprobs[row]), top)
