"""What goes into an encoder and what comes out: texts read and checked, embeddings. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from jaxinfer.request import DeviceUsage, RequestError
from jaxinfer.tokenizer import TextTooLong, Tokenizer

Text = str | Sequence[int]  # or its token ids, those around a text included
TokenIds = Int32[np.ndarray, " T"]  # an eighth of a list's memory, and many texts may wait


class Embedded(NamedTuple):
    """A request that is done."""

    request_id: str
    embeddings: Float32[np.ndarray, "N D"]
    usage: DeviceUsage  # its prefill_seconds are the encoder's


@dataclass(frozen=True, slots=True)
class Truncation:
    """Texts of more than `max_tokens` lose their end (side "right", as sentence-transformers has it) or their beginning ("left")."""

    max_tokens: int  # the special tokens around a text included
    side: Literal["left", "right"] = "right"


@dataclass(frozen=True, slots=True)
class TextReader:
    """From texts to tokens that an encoder can take, and the checks of what is asked of it. Anyone's, in any thread."""

    tokenizer: Tokenizer
    vocab_size: int
    max_tokens: int  # of a text
    embedding_size: int

    def truncation(self, max_tokens: int, side: Literal["left", "right"] = "right") -> Truncation:
        """Of this model's texts; -1 tokens: as many as the model takes. Raises `RequestError` for what none can be cut to."""
        least = sum(self.tokenizer.num_around) + 1
        if max_tokens != -1 and not least <= max_tokens <= self.max_tokens:
            message = f"truncate_prompt_tokens is {max_tokens}: give {least} to {self.max_tokens}, or -1 for {self.max_tokens}"
            raise RequestError(message, "truncate_prompt_tokens")
        return Truncation(self.max_tokens if max_tokens == -1 else max_tokens, side)

    def read(self, texts: Sequence[Text], param: str, truncation: Truncation | None = None) -> list[TokenIds]:
        """Each text's token ids. Raises `RequestError`, naming `param` and the text's place, for one that is empty, has a token id that
        is none, or is too long and not to be truncated."""
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
        if not isinstance(text, str):
            for token in token_ids:
                if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                    raise RequestError(f"{name} has token id {token!r}: this model's are 0 to {self.vocab_size - 1}", param)
        return np.array(token_ids, np.int32)

    def _truncated(self, token_ids: list[int], truncation: Truncation) -> list[int]:
        """The special tokens around a text stay. (Token ids that were sent are taken to have them, as they should.)"""
        num_before, num_after = self.tokenizer.num_around
        end = len(token_ids) - num_after
        num_kept = truncation.max_tokens - num_before - num_after
        kept = slice(num_before, num_before + num_kept) if truncation.side == "right" else slice(end - num_kept, end)
        return token_ids[:num_before] + token_ids[kept] + token_ids[end:]

    def _too_long(self, name: str, measure: str, param: str) -> RequestError:
        message = f"{name} has {measure}: the embedding model takes at most {self.max_tokens} tokens; shorten or truncate it"
        return RequestError(message, param, "context_length_exceeded")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises `RequestError` for a size that an embedding can't be cut to."""
        if dimensions is not None and not 1 <= dimensions <= self.embedding_size:
            raise RequestError(
                f"dimensions is {dimensions}: this model's embeddings have {self.embedding_size}, give 1 to that", "dimensions"
            )


def cut(embeddings: Float32[np.ndarray, "N D"], dimensions: int | None) -> Float32[np.ndarray, "N C"]:
    """The first `dimensions` of each embedding, brought to length 1 again; as they are for None."""
    if dimensions is None or dimensions == embeddings.shape[1]:
        return embeddings
    first = embeddings[:, :dimensions]
    return first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), np.float32(1e-12))
