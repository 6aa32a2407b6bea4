"""SentencePiece's BPE with byte fallback, from a vocabulary and the order of its merges."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SPACE = "▁"  # stands for a space


def merges_of(tokens: Sequence[str], scores: Sequence[float], can_merge: Sequence[bool]) -> list[tuple[str, str]]:
    """All pairs that merge into a token, best first: SentencePiece merges the pair whose token has the highest
    score."""
    mergeable = {token for token, can in zip(tokens, can_merge, strict=True) if can}
    ways = [
        (score, at, len(token) - at, token)
        for token, score in zip(tokens, scores, strict=True)
        if token in mergeable
        for at in range(1, len(token))
        if token[:at] in mergeable and token[at:] in mergeable
    ]
    ways.sort(key=lambda way: way[:3], reverse=True)
    return [(token[:at], token[at:]) for _, at, _, token in ways]


def sentencepiece(vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, adds_space: bool) -> tokenizers.Tokenizer:
    """The backend without added tokens. `adds_space`: encoding prepends a space, decoding removes it."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first" if adds_space else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend
