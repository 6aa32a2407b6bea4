"""Sequences for tests of the schedulers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxinfer.request import DEFAULT_CONTEXT, RequestContext, SamplingParams
from jaxinfer.segments import Prompt, Segment, TokenArray, TokenSegment
from jaxinfer.sequence import OutputProgress, PrefillProgress, Request, Sequence
from jaxinfer.tokenizer.detokenizer import IncrementalDetokenizer
from tests.server.fakes import byte_tokenizer

_TOKENIZER = byte_tokenizer()
_NUMBERS = itertools.count()


def make(length: int, *, leader: Sequence | None = None, context: RequestContext = DEFAULT_CONTEXT, **params: object) -> Sequence:
    """A new sequence with a prompt of this many tokens, younger than all made before."""
    number, sampling = next(_NUMBERS), SamplingParams(**params)  # type: ignore[arg-type]
    request = Request(f"r{number}", Prompt.of_tokens([i % 256 for i in range(length)]), sampling, 0.0, context)
    output = OutputProgress(IncrementalDetokenizer(_TOKENIZER))
    most = 100 if sampling.max_tokens is None else sampling.max_tokens
    index = 0 if leader is None else 1
    tokens = request.prompt.token_ids.tolist()
    return Sequence(request, index, number, 7, frozenset({257}), most, output, tokens, prefill=PrefillProgress(leader))


class History:
    """Tokens by which a page manager knows pages, without the rest of a sequence."""

    def __init__(self, token_ids: Iterable[int], context: RequestContext = DEFAULT_CONTEXT, segments: Iterable[Segment] = ()) -> None:
        self.token_ids, self.context, self.prompt = list(token_ids), context, Prompt(tuple(segments))


@dataclass(frozen=True)
class Picture:
    """A segment that is no text: positions that all have the placeholder's token id."""

    ID: ClassVar[int] = 7
    length: int
    digest: bytes

    @property
    def token_ids(self) -> TokenArray:
        return np.full(self.length, self.ID, np.int32)


def text(token_ids: Iterable[int]) -> Segment:
    """A segment of token ids."""
    return TokenSegment(np.array(list(token_ids), np.int32))
