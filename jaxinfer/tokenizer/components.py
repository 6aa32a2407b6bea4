"""Parts of a tokenizer that every format on disk is read into."""

from __future__ import annotations

from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from jaxinfer.tokenizer.chat_template import ChatTemplate


class TokenizerComponents(NamedTuple):
    backend: tokenizers.Tokenizer
    bos: int | None
    eos: list[int]  # all tokens that end a reply
    template: ChatTemplate
    response_template: Any = None  # of transformers, as it is in the file


def with_ends(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> processors.TemplateProcessing:
    """A processor that adds special tokens before and after a prompt."""
    single = " ".join([*(token for token, _ in before), "$A", *(token for token, _ in after)])
    return processors.TemplateProcessing(single=single, special_tokens=before + after)
