"""What goes into an encoder and what comes out: texts read and checked, embeddings. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
class TextReader:
    """From texts to tokens that an encoder can take, and the checks of what is asked of it. Anyone's, in any thread."""

    tokenizer: Tokenizer
    vocab_size: int
    max_tokens: int  # of a text
    embedding_size: int

    def read(self, texts: Sequence[Text], param: str) -> list[TokenIds]:
        """Each text's token ids. Raises `RequestError`, naming `param` and the text's place, for one that is empty, too long or has a
        token id that is none."""
        if not texts:
            raise RequestError(f"{param} is empty: give at least one text", param)
        return [self._read(text, param, param if len(texts) == 1 else f"{param}[{number}]") for number, text in enumerate(texts)]

    def _read(self, text: Text, param: str, name: str) -> TokenIds:
        if not len(text):
            raise RequestError(f"{name} is empty: give some text", param)
        if isinstance(text, str):
            try:
                token_ids = self.tokenizer.encode(text, max_tokens=self.max_tokens)
            except TextTooLong as error:
                raise self._too_long(name, error.measure, param) from None
            except RequestError as error:
                raise RequestError(f"{name}: {error}", param) from None
        else:
            if len(text) > self.max_tokens:
                raise self._too_long(name, f"{len(text)} tokens", param)
            token_ids = list(text)
            for token in token_ids:
                if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                    raise RequestError(f"{name} has token id {token!r}: this model's are 0 to {self.vocab_size - 1}", param)
        return np.array(token_ids, np.int32)

    def _too_long(self, name: str, measure: str, param: str) -> RequestError:
        message = f"{name} has {measure}: the embedding model takes at most {self.max_tokens} tokens; split or shorten the text"
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
