"""EncodeBatch: texts in rows, several to a row, as padded NumPy arrays, where the host half and the device half meet. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from jaxinfer.encode.text_batching import TokenIds

SHORTEST = 4  # tokens of a text, for how many there may be in a row


class EncodeBatch(NamedTuple):
    """R rows of W places for tokens. A row holds whole texts, one after the other; what is left of it belongs to text S, which is none."""

    token_ids: Int32[Any, "R W"]
    positions: Int32[Any, "R W"]  # of a token in its text
    texts: Int32[Any, "R W"]  # the number of a token's text, of at most S
    shares: Float32[Any, "R W"]  # of a token's hidden state in its text's embedding


def most_texts(num_rows: int, width: int) -> int:
    """S: how many texts a batch can hold."""
    return num_rows * max(width // SHORTEST, 1)


def build_batch(rows: Sequence[Sequence[TokenIds]], num_rows: int, width: int, pooling: str) -> EncodeBatch:
    """Rows of texts' token ids. The texts' numbers are in the order of the rows."""
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
