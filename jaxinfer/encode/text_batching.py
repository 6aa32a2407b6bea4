"""An encoder's input and output: texts tokenized and checked, embeddings. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from jaxinfer.request import DeviceUsage, RequestError
from jaxinfer.token_ids import checked_tokens
from jaxinfer.tokenizer import TextTooLong, Tokenizer

Text = str | Sequence[int]  # or token ids, special tokens included
TokenIds = Int32[np.ndarray, " T"]  # an eighth of a list's memory: many texts may wait


class Embedded(NamedTuple):
    """A finished request."""

    request_id: str
    embeddings: Float32[np.ndarray, "N D"]
    usage: DeviceUsage  # its prefill_seconds are the encoder's


@dataclass(frozen=True, slots=True)
class Truncation:
    """Texts over `max_tokens` are cut at their end ("right", as in sentence-transformers) or at their beginning."""

    max_tokens: int  # special tokens included
    side: Literal["left", "right"] = "right"


@dataclass(frozen=True, slots=True)
class TextReader:
    """Tokenizes texts and checks requests to an encoder. Any thread may call it."""

    tokenizer: Tokenizer
    vocab_size: int
    max_tokens: int  # of a text
    embedding_size: int

    def truncation(self, max_tokens: int, side: Literal["left", "right"] = "right") -> Truncation:
        """Truncation for this model; -1 tokens: its maximum. Raises `RequestError` for an impossible length."""
        least = sum(self.tokenizer.num_around) + 1
        if max_tokens != -1 and not least <= max_tokens <= self.max_tokens:
            message = f"truncate_prompt_tokens is {max_tokens}: give {least} to {self.max_tokens}, or -1 for {self.max_tokens}"
            raise RequestError(message, "truncate_prompt_tokens")
        return Truncation(self.max_tokens if max_tokens == -1 else max_tokens, side)

    def read(self, texts: Sequence[Text], param: str, truncation: Truncation | None = None) -> list[TokenIds]:
        """Each text's token ids. Raises `RequestError`, naming `param` and the text's index, for a text that is empty,
        has an invalid token id, or is too long and not to be truncated."""
        if not texts:
            raise RequestError(f"{param} is empty: give at least one text", param)
        names = [param] if len(texts) == 1 else [f"{param}[{number}]" for number in range(len(texts))]
        return [self._read(text, param, name, truncation) for text, name in zip(texts, names, strict=True)]

    def _read(self, text: Text, param: str, name: str, truncation: Truncation | None) -> TokenIds:
        if not len(text):
            raise RequestError(f"{name} is empty: give some text", param)
        if isinstance(text, str):
            try:
                token_ids = self.tokenizer.encode(text, max_tokens=None if truncation else self.max_tokens)
            except TextTooLong as error:
                raise self._too_long(name, error.measure, param) from None
            except RequestError as error:
                raise RequestError(f"{name}: {error}", param) from None
        else:
            if truncation is None and len(text) > self.max_tokens:
                raise self._too_long(name, f"{len(text)} tokens", param)
            token_ids = list(text)
        if truncation is not None and len(token_ids) > truncation.max_tokens:
            token_ids = self._truncated(token_ids, truncation)
        return np.array(token_ids, np.int32) if isinstance(text, str) else checked_tokens(token_ids, self.vocab_size, name, param)

    def _truncated(self, token_ids: list[int], truncation: Truncation) -> list[int]:
        """Truncated without losing special tokens. (Given token ids are assumed to include them.)"""
        num_before, num_after = self.tokenizer.num_around
        end = len(token_ids) - num_after
        num_kept = truncation.max_tokens - num_before - num_after
        kept = slice(num_before, num_before + num_kept) if truncation.side == "right" else slice(end - num_kept, end)
        return token_ids[:num_before] + token_ids[kept] + token_ids[end:]

    def _too_long(self, name: str, measure: str, param: str) -> RequestError:
        message = f"{name} has {measure}: the embedding model takes at most {self.max_tokens} tokens; shorten or truncate it"
        return RequestError(message, param, "context_length_exceeded")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises `RequestError` for an embedding size that the model can't give."""
        if dimensions is not None and not 1 <= dimensions <= self.embedding_size:
            raise RequestError(
                f"dimensions is {dimensions}: this model's embeddings have {self.embedding_size}, give 1 to that", "dimensions"
            )


def cut(embeddings: Float32[np.ndarray, "N D"], dimensions: int | None) -> Float32[np.ndarray, "N C"]:
    """The first `dimensions` of each embedding, normalised again; unchanged for None."""
    if dimensions is None or dimensions == embeddings.shape[1]:
        return embeddings
    first = embeddings[:, :dimensions]
    return first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), np.float32(1e-12))
