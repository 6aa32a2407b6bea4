"""all-MiniLM-L6-v2 against what the reference made of over a hundred texts (`make golden`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxinfer import Embedder
from tests.golden import embeddings

GOLDEN, TEXTS = embeddings.load(), embeddings.texts()


@pytest.fixture(scope="module")
def minilm() -> Iterator[Embedder]:
    yield Embedder("minilm", dtype="float32")


def test_there_are_texts_of_every_kind() -> None:
    lengths = [len(token_ids) for token_ids in GOLDEN.token_lists]
    assert len(TEXTS) == len(lengths) == len(GOLDEN.embeddings) > 100
    assert (min(lengths), max(lengths)) == (2, 256)
    assert sum(length > 64 for length in lengths) > 15


def test_token_ids_are_the_references(minilm: Embedder) -> None:
    for text, token_ids in zip(TEXTS, GOLDEN.token_lists, strict=True):
        assert minilm.tokenizer.encode(text) == token_ids, text


def test_embeddings_are_the_references(minilm: Embedder) -> None:
    made = minilm.embed(TEXTS)
    assert made.dtype == np.float32
    cosines = embeddings.cosines(made, GOLDEN.embeddings)
    print(f"lowest cosine {cosines.min():.7f}")
    assert cosines.min() > embeddings.MIN_COSINE
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(made, GOLDEN.embeddings, atol=3e-4)  # float16's rounding among it


def test_the_limit_is_sentence_transformers_own(minilm: Embedder) -> None:
    assert (minilm.max_tokens, minilm.embedding_size) == (256, 384)
