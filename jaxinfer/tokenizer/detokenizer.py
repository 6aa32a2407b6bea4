"""IncrementalDetokenizer: one sequence's tokens to text, step by step; never ends inside a character or a possible stop
string."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import Protocol

from jaxinfer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Call `add` for each token, then `flush`. The texts joined are `tokenizer.decode` of all tokens, cut before the
    first stop string, or after it with `includes_stop`.

    The stop string is the one completed first, across token borders (of two completed at once, the longer). `stopped`
    is then that string, and no more text follows. The first `min_tokens - 1` tokens complete none.
    `kept_special_tokens` are in the text although others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        includes_stop: bool = False,
        kept_special_tokens: Collection[int] = (),
    ) -> None:
        pieces = _BytePieces if tokenizer.is_byte_level else _WindowPieces
        skipped = tokenizer.special_ids.difference(kept_special_tokens) if skip_special_tokens else frozenset()
        self._pieces: _Pieces = pieces(tokenizer, skipped)
        self._stop, self._includes_stop = stop, includes_stop
        self._held = ""  # text held back: it may begin a stop string
        self._num_until_stop = min_tokens
        self.stopped: str | None = None

    def add(self, token_id: int) -> str:
        """The text that is certain after this token; often empty."""
        if self.stopped is not None:
            return ""
        self._num_until_stop -= 1
        text = self._pieces.add(token_id)
        return self._release(text) if self._stop and text else text

    def flush(self) -> str:
        """The text that was held back, at the end of the sequence."""
        if self.stopped is not None:
            return ""
        text = self._release(self._pieces.flush()) if self._stop else self._pieces.flush()
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        if self._num_until_stop <= 0:
            found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
            if found:
                end, at, self.stopped = min(found)
                self._held = ""
                return text[: end if self._includes_stop else at]
        certain = next(at for at in range(len(text) + 1) if self._may_begin_stop(text, at))
        self._held = text[certain:]
        return text[:certain]

    def _may_begin_stop(self, text: str, at: int) -> bool:
        """Whether text[at:] is empty or the beginning of some stop string."""
        return at == len(text) or any(len(s) > len(text) - at and s.startswith(text[at:]) for s in self._stop)


class _Pieces(Protocol):
    def add(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _BytePieces:
    """For byte-level vocabularies: joins bytes and holds back those of an unfinished character. Under a microsecond a
    token."""

    def __init__(self, tokenizer: Tokenizer, skipped: Collection[int]) -> None:
        self._bytes_of, self._text_of = tokenizer.token_bytes, tokenizer.token_text
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_in_character = False

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._is_in_character and (text := self._text_of(token_id)) is not None:
            return text
        text = self._decoder.decode(self._bytes_of(token_id))
        self._is_in_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowPieces:
    """For vocabularies whose decoders depend on neighbours (SentencePiece drops the first space). Decodes the last few
    tokens with and without the new ones; the difference is new text once it ends in a whole character."""

    def __init__(self, tokenizer: Tokenizer, skipped: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._num_told = 0  # tokens at the window's start whose text was returned: context for the others

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        told, text = self._decode(self._num_told), self._decode(len(self._window))
        if text.endswith("\ufffd") or len(text) <= len(told):
            return ""
        del self._window[: self._num_told]
        self._num_told = len(self._window)
        return text[len(told) :]

    def flush(self) -> str:
        text = self._decode(len(self._window))[len(self._decode(self._num_told)) :]
        self._window, self._num_told = [], 0
        return text

    def _decode(self, count: int) -> str:
        return self._tokenizer.decode(self._window[:count], skip_special_tokens=False)
