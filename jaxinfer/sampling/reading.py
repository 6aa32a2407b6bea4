"""A step's log-probabilities as the host reads them."""

from __future__ import annotations

from jaxinfer.request import TokenLogprob
from jaxinfer.sampling.sampler import Sampled


def read_logprob(sampled: Sampled, row: int, num_top: int) -> TokenLogprob:
    """The sampled token's of one row, with the `num_top` likeliest."""
    top = zip(sampled.top_tokens[row, :num_top].tolist(), sampled.top_logprobs[row, :num_top].tolist(), strict=True)
    return TokenLogprob(int(sampled.tokens[row]), float(sampled.logprobs[row]), tuple(top))
