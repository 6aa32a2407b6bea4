"""Byte-level BPE: bytes as characters, and the pre-tokenization patterns of known vocabularies."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: its own if it has one, else one above 255 (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _bytes_of_characters()
CHARACTERS = {byte: character for character, byte in BYTES.items()}


@dataclass(frozen=True)
class PreTokenization:
    """`patterns` split text one after the other, each the pieces of the one before; empty for GPT-2's, built into the
    library.

    `ignore_merges`: a word that is a token becomes that token even if no merges lead to it.
    """

    patterns: tuple[str, ...] = ()
    splits_digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False  # by default
    normalizes: bool = False  # to Unicode NFC


# The patterns are data of these models, from their tokenizer.json or code.
_CLASSIC = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(upper: str, lower: str, ending: str, number: str, after_symbols: str) -> str:
    """Words begin at a capital, so camelCase is two (OpenAI's o200k and its successors)."""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{ending}|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{ending}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|\s*[\r\n]+|\s+(?!\S)|\s+"


_O200K = _cased(_UPPER, _LOWER, _CONTRACTED, r"\p{N}{1,3}", r"[\r\n/]*")
_TEKKEN = _cased(_UPPER, _LOWER, "", r"\p{N}", r"[\r\n/]*")
_NO_HAN = "&&[^\\p{Han}]"
_KIMI = r"[\p{Han}]+|" + _cased(_UPPER + _NO_HAN, _LOWER + _NO_HAN, _CONTRACTED, r"\p{N}{1,3}", r"[\r\n]*")
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)

# By GGUF's `tokenizer.ggml.pre`.
WORDS: dict[str, PreTokenization] = {
    "gpt-2": PreTokenization(),
    "smollm": PreTokenization(splits_digits=True),
    "llama-bpe": PreTokenization((_CLASSIC % r"\p{N}{1,3}",), ignore_merges=True, adds_bos=True),
    "llama4": PreTokenization((_O200K,), ignore_merges=True),
    "gpt-4o": PreTokenization((_O200K,), ignore_merges=True),
    "qwen2": PreTokenization((_CLASSIC % r"\p{N}",), normalizes=True),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-v3": PreTokenization(_DEEPSEEK),
    "kimi-k2": PreTokenization((_KIMI,), ignore_merges=True),
}


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], words: PreTokenization) -> tokenizers.Tokenizer:
    """The backend without added tokens. Raises the library's plain Exception for merges that don't fit the
    vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=words.ignore_merges))
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if words.splits_digits else []
    cuts += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words.patterns)])
    if words.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend
