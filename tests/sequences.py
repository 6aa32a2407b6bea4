"""Sequences for tests of the schedulers."""

from __future__ import annotations

import itertools

from jaxinfer.detokenizer import IncrementalDetokenizer
from jaxinfer.request import DEFAULT_CONTEXT, Request, RequestContext, SamplingParams
from jaxinfer.sequence import Sequence
from tests.server.fakes import byte_tokenizer

_TOKENIZER = byte_tokenizer()
_NUMBERS = itertools.count()


def make(length: int, *, leader: Sequence | None = None, context: RequestContext = DEFAULT_CONTEXT, **params: object) -> Sequence:
    """A new sequence with a prompt of this many tokens, younger than all made before."""
    number, sampling = next(_NUMBERS), SamplingParams(**params)  # type: ignore[arg-type]
    request = Request(f"r{number}", tuple(i % 256 for i in range(length)), sampling, 0.0, context)
    detokenizer = IncrementalDetokenizer(_TOKENIZER)
    most = 100 if sampling.max_tokens is None else sampling.max_tokens
    index = 0 if leader is None else 1
    tokens = list(request.prompt_token_ids)
    return Sequence(request, index, number, 7, frozenset({257}), most, detokenizer, tokens, leader=leader)
