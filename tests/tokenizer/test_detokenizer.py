"""Streams of tokens to text: joined they are `decode`, a character is never split, no part of a stop string gets out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from checkpoints import hub
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.detokenizer import IncrementalDetokenizer


@cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_source(hub.open_source(hub.resolve("default")))


@cache
def byte_ids() -> dict[int, int]:
    """The tokens that are one byte; the vocabulary lacks a few bytes that only the rarest text needs."""
    return {piece[0]: i for i in range(byte_level().vocab_size) if len(piece := byte_level().token_bytes(i)) == 1}


@cache
def sentencepiece_like() -> Tokenizer:
    """A vocabulary whose decoder is not a join of bytes: byte tokens for what it does not have, the first space dropped."""
    pieces = ["<unk>", "<s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghé", "▁a", "▁ab", "ab"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b"), ("▁", "ab")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, 1, (), ChatTemplate(None, {}))


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49152 + 50), max_size=40), skip=st.booleans())
def test_any_tokens_joined_are_their_decoding(ids: list[int], skip: bool) -> None:
    assert "".join(stream(IncrementalDetokenizer(byte_level(), (), skip), ids)) == byte_level().decode(ids, skip_special_tokens=skip)


def test_some_special_tokens_can_be_kept_where_others_are_skipped() -> None:
    first, second, *_ = sorted(byte_level().special_ids)
    name = byte_level().decode([first], skip_special_tokens=False)
    ids = [second, first, *byte_level().encode("a", False), first, second]
    assert "".join(stream(IncrementalDetokenizer(byte_level(), kept_special_tokens=(first,)), ids)) == f"{name}a{name}"
    like = sentencepiece_like()
    assert "".join(stream(IncrementalDetokenizer(like, kept_special_tokens=(1,)), [1, like.encode("é", False)[-1], 1])) == "<s>é<s>"


@settings(deadline=None)
@given(data=st.binary(max_size=60) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_joined_are_their_decoding(data: bytes) -> None:
    data = bytes(byte for byte in data if byte in byte_ids())
    ids = [byte_ids()[byte] for byte in data]
    text = "".join(stream(IncrementalDetokenizer(byte_level()), ids))
    assert text == data.decode("utf-8", "replace") == byte_level().decode(ids)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=30))
def test_text_comes_in_whole_characters(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    whole, so_far = tokenizer.decode(ids), ""
    assume("\ufffd" not in whole)
    for piece in stream(IncrementalDetokenizer(tokenizer), ids):
        assert "\ufffd" not in piece
        so_far += piece
        assert whole.startswith(so_far)
    assert so_far == whole


@settings(deadline=None)
@given(text=st.text(alphabet=" abcdé🎉", max_size=40))
def test_vocabularies_that_look_at_neighbours_keep_their_spaces(text: str) -> None:
    ids = [1, *sentencepiece_like().encode(text)]
    assert "".join(stream(IncrementalDetokenizer(sentencepiece_like()), ids)) == sentencepiece_like().decode(ids)


def cut_at_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment the text ends in a stop string, the longest of several."""
    for end in range(len(text) + 1):
        for s in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(s):
                return text[: end - len(s)], s
    return text, None


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="aabbn\n é", max_size=25), stop=st.lists(st.text(alphabet="aabbn\n é", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_the_text_whatever_tokens_they_span(text: str, stop: list[str]) -> None:
    for tokenizer in (byte_level(), sentencepiece_like()):
        ids = tokenizer.encode(text)
        expected, which = cut_at_stop(tokenizer.decode(ids), stop)
        detokenizer, so_far = IncrementalDetokenizer(tokenizer, tuple(stop)), ""
        for i in ids:
            so_far += detokenizer.add(i)
            assert expected.startswith(so_far)  # never more than what stays
        assert so_far + detokenizer.flush() == expected
        assert detokenizer.stopped == which


def test_after_a_stop_string_there_is_no_more_text() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), ("END",))
    assert "".join(detokenizer.add(i) for i in byte_level().encode("one END two END")) == "one "
    assert detokenizer.stopped == "END"
    assert detokenizer.add(byte_level().encode("more")[0]) == ""
    assert detokenizer.flush() == ""


def test_the_first_tokens_can_be_kept_from_ending_the_text() -> None:
    ids = [byte_ids()[byte] for byte in b"a.b.c.d"]
    detokenizer = IncrementalDetokenizer(byte_level(), (".",), min_tokens=4)
    assert "".join(detokenizer.add(i) for i in ids) == "a.b"
    assert detokenizer.stopped == "."


def test_a_long_stop_string_costs_no_more_memory_than_itself() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), ("a" * 200_000,))
    ids = byte_level().encode("aaaa" * 50) + byte_level().encode(" b")
    assert "".join(stream(detokenizer, ids)) == "a" * 200 + " b"
