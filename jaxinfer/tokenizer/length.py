"""A lower bound on a text's number of tokens from its length: prompts that can't fit are refused before any work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import tokenizers
from tokenizers import models

from jaxinfer.tokenizer.byte_level import CHARACTERS

# Unicode NFC shortens text by a factor of 3.5 at most: U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes.
_NFC_SHRINKS = 4
_WORD = re.compile(r"[0-9A-Za-z][^ \t\r\n]*")


class LengthBound(Protocol):
    def min_tokens(self, text: str, limit: int) -> int:
        """A lower bound on the text's number of tokens. Counts no further than needed to exceed `limit`."""
        ...


@dataclass(frozen=True, slots=True)
class ByteBound:
    """For BPE: each token stands for a bounded number of bytes. Some bytes become no token: those in `dropped`, which
    the vocabulary lacks, and with `drops_spaces` white space beside added tokens (lstrip, rstrip)."""

    max_token_bytes: int
    dropped: bytes = b""
    drops_spaces: bool = False

    def min_tokens(self, text: str, limit: int) -> int:
        if len(text) * 4 <= limit * self.max_token_bytes:  # a character has at most 4 bytes
            return 0
        if self.drops_spaces:
            text = "".join(text.split())
        num_bytes = len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped))
        return -(-num_bytes // self.max_token_bytes)


class WordBound:
    """For BERT's WordPiece, where one token may be a word of any length: a word with an ASCII letter or digit is at
    least one token."""

    def min_tokens(self, text: str, limit: int) -> int:
        return sum(1 for _ in islice(_WORD.finditer(text), limit + 1))


class NoBound:
    """For tokenizers that may drop text of any length."""

    def min_tokens(self, text: str, limit: int) -> int:
        return 0


def length_bound(backend: tokenizers.Tokenizer) -> LengthBound:
    """The bound that holds for all texts with this tokenizer."""
    normalizers = [*_steps(backend.normalizer, "normalizers")]
    cuts = [*_steps(backend.pre_tokenizer, "pretokenizers")]
    added = backend.get_added_tokens_decoder().values()
    if isinstance(backend.model, models.WordPiece):
        is_bert = [step["type"] for step in (*normalizers, *cuts)] == ["BertNormalizer", "BertPreTokenizer"]
        return WordBound() if is_bert and not any(token.content.split() != [token.content] for token in added) else NoBound()
    if not (
        isinstance(backend.model, models.BPE)
        and all(map(_keeps_text, normalizers))
        and all(cut["type"] in _CUTS or (cut["type"] == "Split" and cut["behavior"] != "Removed") for cut in cuts)
    ):
        return NoBound()
    vocab = backend.get_vocab(with_added_tokens=False)
    is_byte_level = any(cut["type"] == "ByteLevel" for cut in cuts)
    is_shrunk = any(step["type"] == "NFC" for step in normalizers)
    dropped = bytes(byte for byte, character in CHARACTERS.items() if character not in vocab) if is_byte_level else b""
    if not is_byte_level and not (backend.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))):
        return NoBound()  # consecutive characters without a token become one unknown token, or none
    if is_shrunk and not _NEVER_IN_TEXT.issuperset(dropped):
        return NoBound()  # the dropped bytes are known only after normalization
    # A character of a byte-level token stands for one byte.
    most = max(len(token) if is_byte_level else len(token.encode()) for token in vocab)
    most = max([most, *(len(token.content.encode()) for token in added)])
    most *= _NFC_SHRINKS if is_shrunk else 1
    return ByteBound(most, dropped, drops_spaces=any(token.lstrip or token.rstrip for token in added))


_CUTS = ("ByteLevel", "Digits", "Metaspace")
_NEVER_IN_TEXT = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))  # bytes that don't occur in UTF-8


def _keeps_text(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return step["type"] in ("NFC", "Prepend")


def _steps(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """Settings of a normalizer or pre-tokenizer, with sequences flattened."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        settings = waiting.pop(0)
        if settings["type"] == "Sequence":
            waiting = [*settings[name], *waiting]
        else:
            yield settings
