"""Live against the reference implementation: MiniLM's embeddings and token ids, and random encoders of other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertConfig, BertModel

from checkpoints import hub
from jaxinfer import Embedder
from tests import tiny_encoder
from tests.golden import embeddings
from tests.parity import reference

pytestmark = pytest.mark.parity

FOLDER = hub.resolve("minilm")
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
# What the golden file doesn't have.
TEXTS = [
    "El zorro marrón rápido salta sobre el perro perezoso.",
    "素早い茶色の狐が怠け者の犬を飛び越える。",
    "🦊 ➡️ 🐶",
    "SELECT name, count(*) FROM users GROUP BY name HAVING count(*) > 1;",
    "\u200b\u00ad\u0301 e\u0301 ﬁ ǅ",
    "supercalifragilisticexpialidocious" * 4,
    *(" ".join(f"Sentence {i} of {n} is here." for i in range(n)) for n in (1, 4, 9, 20)),
]


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return Embedder("minilm", dtype="float32")


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_embeddings_are_the_references(minilm: Embedder) -> None:
    model = reference.load_encoder(FOLDER)
    texts = TEXTS + embeddings.texts()
    expected = np.stack([unit(reference.hidden_states(model, TOKENIZER.encode(text)).mean(0)) for text in texts])
    made = minilm.embed(texts)
    assert embeddings.cosines(made, expected).min() > embeddings.MIN_COSINE
    np.testing.assert_allclose(made, expected, atol=1e-5)


def test_bfloat16_weights_come_close() -> None:
    rounded = Embedder("minilm", dtype="bfloat16").embed(embeddings.texts())
    assert embeddings.cosines(rounded, embeddings.load().embeddings).min() > 0.9995


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_token_ids_of_any_text_are_the_references(minilm: Embedder, text: str) -> None:
    assert minilm.tokenizer.encode(text) == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 2, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1},
        {"type_vocab_size": 1, "layer_norm_eps": 1e-3, "max_position_embeddings": 300},
    ],
)
def test_a_random_encoder_gives_the_references_embeddings(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    tiny_encoder.write(tmp_path, normalizes=False, **changes)
    (tmp_path / "model.safetensors").unlink()
    model = BertModel(BertConfig(**{**tiny_encoder.CONFIG, **changes}, initializer_range=0.2)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero as initialised, which would hide them
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    token_lists = tiny_encoder.token_lists()
    expected = np.stack([reference.hidden_states(model, token_ids).mean(0) for token_ids in token_lists])
    np.testing.assert_allclose(Embedder(str(tmp_path), dtype="float32").embed(token_lists), expected, atol=1e-4)
