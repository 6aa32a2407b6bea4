"""The texts whose embeddings are kept, and what the reference made of them (`make golden`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "embeddings.npz"
MIN_COSINE = 0.9999


def texts() -> list[str]:
    """Over a hundred: of many scripts, emoji, code, white space, markup, from no word at all to exactly the model's 256 tokens."""
    inputs = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    short = [text for text in inputs["texts"] if text]
    long = [" ".join(short[start : start + 6]) for start in range(0, 90, 6)] + [
        "\n".join(short[start : start + 12]) for start in (20, 40, 60)
    ]
    exact = ["the " * (length - 2) for length in (31, 32, 33, 64, 65, 128, 129, 255, 256)]
    return short + long + exact


@dataclass(frozen=True)
class Golden:
    token_lists: list[list[int]]
    embeddings: np.ndarray  # float16 [N, 384]
    tiny_mean: np.ndarray  # float32 [N, D], of tests/tiny_encoder.py's model and token lists, not normalised
    tiny_first: np.ndarray


def load() -> Golden:
    with np.load(FILE) as file:
        ends = np.cumsum(file["lengths"])
        token_lists = [ids.tolist() for ids in np.split(file["token_ids"], ends[:-1])]
        return Golden(token_lists, file["embeddings"], file["tiny_mean"], file["tiny_first"])


def save(golden: Golden) -> None:
    np.savez_compressed(
        FILE,
        token_ids=np.concatenate(golden.token_lists).astype(np.uint16),
        lengths=np.array([len(ids) for ids in golden.token_lists], np.uint16),
        embeddings=golden.embeddings.astype(np.float16),
        tiny_mean=golden.tiny_mean,
        tiny_first=golden.tiny_first,
    )


def cosines(embeddings: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each row to the same of the other."""
    a, b = embeddings.astype(np.float64), expected.astype(np.float64)
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
