"""A made-up BERT of 100 KB with a real tokenizer, written as sentence-transformers keeps an encoder: tests need no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

HIDDEN, LAYERS, HEADS, MLP, VOCAB, POSITIONS, MAX_TOKENS = 32, 2, 4, 48, 84, 80, 70
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "type_vocab_size": 2,
    "max_position_embeddings": POSITIONS,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write(folder: Path, *, pooling: str = "mean", normalizes: bool = True, **changes: Any) -> Path:
    """Write config, weights, tokenizer and sentence-transformers' files. `pooling` is 'mean' or 'cls'."""
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{k}" if i else "", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_max_tokens": False}
    files = {
        "config.json": CONFIG | changes,
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": HIDDEN, **modes},
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
        "tokenizer_config.json": {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    save_file(tensors(), folder / "model.safetensors")
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def tensors() -> dict[str, np.ndarray]:
    """Random float32 weights of CONFIG, by Hugging Face's names; no bias is 0 and no scale 1, which would hide them."""
    random = np.random.default_rng(11)

    def normal(*shape: int, gain: float = 1.0, mean: float = 0.0) -> np.ndarray:
        return (mean + gain * random.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": normal(HIDDEN, gain=0.3, mean=1.0), f"{name}.bias": normal(HIDDEN, gain=0.3)}

    def dense(name: str, out: int, size: int) -> dict[str, np.ndarray]:
        return {f"{name}.weight": normal(out, size, gain=1.5 * size**-0.5), f"{name}.bias": normal(out, gain=0.3)}

    weights = {
        "embeddings.word_embeddings.weight": normal(VOCAB, HIDDEN),
        "embeddings.position_embeddings.weight": normal(POSITIONS, HIDDEN, gain=0.5),
        "embeddings.token_type_embeddings.weight": normal(2, HIDDEN, gain=0.5),
        **norm("embeddings.LayerNorm"),
        **dense("pooler.dense", HIDDEN, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            weights |= dense(f"{name}.attention.self.{part}", HIDDEN, HIDDEN)
        weights |= dense(f"{name}.attention.output.dense", HIDDEN, HIDDEN) | norm(f"{name}.attention.output.LayerNorm")
        weights |= dense(f"{name}.intermediate.dense", MLP, HIDDEN) | dense(f"{name}.output.dense", HIDDEN, MLP)
        weights |= norm(f"{name}.output.LayerNorm")
    return weights


def tokenizer() -> tokenizers.Tokenizer:
    """WordPiece over letters and digits, lower-cased: [CLS], a token a character, [SEP]."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
    vocab = {token: i for i, token in enumerate([*SPECIAL, *characters, *(f"##{c}" for c in characters)])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    )
    backend.add_special_tokens(list(SPECIAL))
    return backend


def token_lists() -> list[list[int]]:
    """Texts of many lengths, from 2 tokens to the most, as random tokens."""
    random = np.random.default_rng(12)
    return [[2, *random.integers(4, VOCAB, length - 2).tolist(), 3] for length in (2, 3, 5, 8, 13, 21, 31, 32, 33, 48, 64, 65, MAX_TOKENS)]
