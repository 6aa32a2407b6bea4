"""EncodeBatch: texts in rows, several to a row, as padded NumPy arrays: what the host gives the encode program. Imports
no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from jaxinfer.encode.text_batching import TokenIds

SHORTEST = 4  # tokens of a text, which limits the number of texts in a row


class EncodeBatch(NamedTuple):
    """R rows of W tokens. A row has whole texts, one after the other; padding has text number S, which is no text."""

    token_ids: Int32[Any, "R W"]
    positions: Int32[Any, "R W"]  # within a token's text
    texts: Int32[Any, "R W"]  # number of a token's text, below S
    shares: Float32[Any, "R W"]  # weight of a token's hidden state in its text's embedding


def most_texts(num_rows: int, width: int) -> int:
    """S: the most texts in a batch."""
    return num_rows * max(width // SHORTEST, 1)


def build_batch(rows: Sequence[Sequence[TokenIds]], num_rows: int, width: int, pooling: str) -> EncodeBatch:
    """A batch of these rows of texts. Texts are numbered in the order of rows."""
    batch = empty_batch(num_rows, width)
    number = 0
    for row, texts in enumerate(rows):
        start = 0
        for token_ids in texts:
            end = start + len(token_ids)
            batch.token_ids[row, start:end] = token_ids
            batch.positions[row, start:end] = np.arange(len(token_ids))
            batch.texts[row, start:end] = number
            if pooling == "mean":
                batch.shares[row, start:end] = 1 / len(token_ids)
            else:
                batch.shares[row, start] = 1
            start, number = end, number + 1
    return batch


def empty_batch(num_rows: int, width: int) -> EncodeBatch:
    """Padding only."""
    shape = (num_rows, width)
    return EncodeBatch(
        token_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        texts=np.full(shape, most_texts(num_rows, width), np.int32),
        shares=np.zeros(shape, np.float32),
    )
