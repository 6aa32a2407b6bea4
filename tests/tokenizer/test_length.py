"""A text that can't fit is refused by its length, before it is tokenized; one that fits never is; no thread waits for another's text."""

from __future__ import annotations

import random
import sys
import threading
import time
import unicodedata
from functools import cache

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxinfer.tokenizer import TextTooLong, Tokenizer
from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.length import _NFC_SHRINKS, ByteBound, NoBound, WordBound, length_bound
from tests.golden.tokenizers import read

LONG = 3_000_000


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer.from_folder(read.FOLDER / family)


def texts_for(tokenizer: Tokenizer) -> list[str]:
    """What has few tokens for its length: long tokens again and again, what normalizing shortens, what an added token swallows."""
    rng = random.Random(0)
    tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.vocab_size)]
    longest = sorted(tokens, key=lambda token: len(token.encode()))[-20:]
    added = [token.content for token in tokenizer._backend.get_added_tokens_decoder().values()]
    composed = "".join(unicodedata.normalize("NFD", c) for c in "ế\u0390힣ṩ")
    pieces = [*longest, *added, composed, "\u1fbe\u0308\u0301", " " * 99, "\n\t", "\x01\x04\x1d", "▁▁", "é漢🎉", "\U000e0041"]
    return [token * 20 for token in longest] + ["".join(rng.choices(pieces, k=40)) for _ in range(60)]


@pytest.mark.parametrize("family", read.NAMES)
def test_no_text_has_fewer_tokens_than_its_length_tells(family: str) -> None:
    tokenizer = tokenizer_of(family)
    for text in [case.text for case in read.texts(family)] + texts_for(tokenizer):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert length_bound(tokenizer._backend).min_tokens(text, 0) <= num_tokens, text
        assert len(tokenizer.encode(text, add_special_tokens=False, max_tokens=num_tokens)) == num_tokens


@pytest.mark.parametrize("family", read.NAMES)
def test_a_text_that_is_far_too_long_is_refused_at_once(family: str) -> None:
    tokenizer = tokenizer_of(family)
    started = time.process_time()
    with pytest.raises(TextTooLong, match="at least") as error:
        tokenizer.encode("hello world, " * (LONG // 13), max_tokens=512)
    assert error.value.code == "context_length_exceeded"
    assert time.process_time() - started < 0.5  # tokenizing takes seconds


def bpe(vocab: list[str], **settings: bool) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[], **settings))


def test_what_is_known_of_other_kinds() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_level = bpe([*alphabet, "Ġ" * 9])
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert length_bound(byte_level) == ByteBound(9)
    byte_level.add_tokens([AddedToken("<a long name>", rstrip=True)])
    assert length_bound(byte_level) == ByteBound(13, drops_spaces=True)
    lacking = bpe([c for c in alphabet if c not in "ab"])
    lacking.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert length_bound(lacking) == ByteBound(1, b"ab")
    for normalizer, known in ((normalizers.NFKC(), False), (normalizers.Replace(Regex(" +"), " "), False), (normalizers.NFC(), True)):
        byte_level.normalizer = normalizer
        assert isinstance(length_bound(byte_level), ByteBound) == known
    byte_level.normalizer = None
    byte_level.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    assert isinstance(length_bound(byte_level), NoBound)
    assert isinstance(length_bound(bpe(["a", "b"], byte_fallback=True)), NoBound)
    unigram = tokenizers.Tokenizer(models.Unigram([("a", -1.0), ("<unk>", -2.0)], unk_id=1))
    assert isinstance(length_bound(unigram), NoBound)


def wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


@pytest.mark.parametrize(
    "text",
    ["a" * 500, "a" * 500 + " ", " " * 500, "\u0301 \u0301", "\x00\x01 \x02", "a.b c-d", "é à", "a\u0301a a", "漢 字", "a\u00a0b\u2003c"],
)
def test_words_are_a_token_each_at_least(text: str) -> None:
    backend = wordpiece()
    assert isinstance(length_bound(backend), WordBound)
    assert length_bound(backend).min_tokens(text, 100) <= len(backend.encode(text).ids)
    assert length_bound(backend).min_tokens("ab, 1 " * 50, 1000) == 100


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    """Before, `encode` held the interpreter's lock for as long as it took: 0.6 s a megabyte."""
    tokenizer = Tokenizer(byte_level_backend(), None, (), ChatTemplate(None, {}))
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    started = time.perf_counter()
    try:
        with pytest.raises(TextTooLong, match="has 600000 tokens"):
            tokenizer.encode(".a" * 300_000, max_tokens=599_999)
    finally:
        done.set()
        ticker.join(10)
    seconds = time.perf_counter() - started
    assert max(gaps) < seconds / 3, (max(gaps), seconds)


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = bpe([*pre_tokenizers.ByteLevel.alphabet(), "a long token"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_nfc_shortens_text_by_no_more_than_is_reckoned_with() -> None:
    """The longest spelling of each character, in bytes, by that of the parts it can be spelled with."""
    spelling: dict[str, int] = {}
    composed = [chr(i) for i in range(sys.maxunicode + 1) if unicodedata.decomposition(chr(i)) or 0xAC00 <= i <= 0xD7A3]
    for character in composed:
        decomposed = unicodedata.normalize("NFD", character)
        spelling[decomposed] = max(spelling.get(decomposed, 0), len(character.encode()))

    def longest(text: str) -> int:
        best = [0]
        for end in range(1, len(text) + 1):
            ends = [best[at] + spelling[text[at:end]] for at in range(end) if text[at:end] in spelling]
            best.append(max(best[-1] + len(text[end - 1].encode()), *ends, 0))
        return best[-1]

    characters = [character for character in composed if unicodedata.normalize("NFC", character) == character]
    assert 3 < max(longest(unicodedata.normalize("NFD", character)) / len(character.encode()) for character in characters) <= _NFC_SHRINKS
