"""Text of a conversation that must not become control tokens, tracked through the model's chat template.

A user who writes `<|im_end|>` into a message must not end it. While a template runs, those characters of untrusted text
that could belong to a control token are replaced by private-use characters (marks). Whatever the template joins, cuts
or changes: what is still marked in the result was not written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from jaxinfer.request import RequestError

_BEGINNING = 3  # leading characters of a spelling, for a quick first search
_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
# Roles and types that templates know are trusted: templates may make control tokens of them.
_KNOWN = {"role": ("system", "developer", "user", "assistant", "tool"), "type": ("text", "function")}


class PromptText(str):
    """A rendered prompt. `cuts`: positions inside spellings of control tokens that are plain text; text before and
    after a cut is tokenized separately."""

    cuts: tuple[int, ...] = ()

    def __new__(cls, text: str, cuts: Iterable[int] = ()) -> PromptText:
        prompt = super().__new__(cls, text)
        prompt.cuts = tuple(cuts)
        return prompt


class ControlTokens:
    """Spellings that untrusted text must not be tokenized as. `in_answers`: those allowed in an assistant's message,
    since the model writes them as visible text, which clients send back."""

    def __init__(self, spellings: Iterable[str], in_answers: Iterable[str] = ()) -> None:
        self._spellings = frozenset(spelling for spelling in spellings if len(spelling) > 1)
        self._in_answers = frozenset(in_answers)
        self._lengths = sorted({len(spelling) for spelling in self._spellings})
        beginnings = sorted({spelling[:_BEGINNING] for spelling in self._spellings})
        self._beginning = re.compile("(?=" + "|".join(map(re.escape, beginnings)) + ")" if beginnings else "(?!)")
        # With both ends of a spelling marked, a partial one next to the template's text is caught too.
        self.edges = "".join(sorted({end for spelling in self._spellings for end in (spelling[0], spelling[-1])}))
        self._insides = "\n".join(spelling[1:-1] for spelling in self._spellings)

    def has_edge(self, text: str) -> bool:
        """Whether the text has a character with which a control token begins or ends."""
        return any(edge in text for edge in self.edges)

    def is_inside(self, text: str) -> bool:
        """Whether the text could complete a control token between texts of the template."""
        return bool(text) and len(text) <= max(self._lengths, default=0) and text in self._insides

    def marks(self, values: Iterable[Any]) -> Marks | None:
        """Marks for these values; None if they contain nothing to mark."""
        texts = [*_texts(values)]
        if not any(self.has_edge(text) or (not is_key and self.is_inside(text.strip())) for text, is_key in texts):
            return None
        return Marks(self, {character for text, _ in texts if not text.isascii() for character in _PRIVATE.findall(text)})

    def prompt(self, plain: str, marked: str, marks: Marks) -> PromptText:
        """The prompt from two renderings, without and with marks."""
        marked = str.__str__(marked)  # a plain str, whose marks are visible
        restored = marks.restore(marked)
        made, untrusted = [], []
        for start, end in self._find(restored):
            spelling, origin = restored[start:end], marked[start:end]
            is_trusted = origin == spelling or (spelling in self._in_answers and marks.is_answer(origin))
            made.append(spelling) if is_trusted else untrusted.append(start + 1)
        if [plain[start:end] for start, end in self._find(plain)] == made:
            return PromptText(plain)  # no untrusted spelling is left
        return PromptText(restored, sorted(set(untrusted)))

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        """Positions of control tokens' spellings, overlapping ones included."""
        for found in self._beginning.finditer(text):
            start = found.start()
            for length in self._lengths:
                if text[start : start + length] in self._spellings:
                    yield start, start + length


class Marks:
    """Private-use characters that stand for others; the text itself contains none of them."""

    def __init__(self, control: ControlTokens, used: set[str]) -> None:
        self._control = control
        self._free = (chr(code) for plane in (0xF0000, 0x100000) for code in range(plane, plane + 0xFFFE) if chr(code) not in used)
        self._marks: dict[tuple[str, bool], str] = {}
        self._restored: dict[str, str] = {}
        self._of_answers: set[str] = set()

    def mark_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with untrusted text marked; roles that templates know stay."""
        return [{key: self._mark_field(message, key, value) for key, value in message.items()} for message in messages]

    def _mark_field(self, message: dict[str, Any], key: str, value: Any) -> Any:
        if _is_known(key, value):
            return value
        return self.mark(value, is_answer=key == "content" and message.get("role") == "assistant")

    def mark(self, value: Any, *, is_answer: bool = False) -> Any:
        """A value of JSON types with its text marked."""
        if isinstance(value, str):
            return self._mark_text(value, is_answer)
        if isinstance(value, Mapping):
            return {
                self._mark_edges(key, is_answer): item if _is_known(key, item) else self.mark(item, is_answer=is_answer)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return type(value)(self.mark(item, is_answer=is_answer) for item in value)
        return value

    def _mark_text(self, text: str, is_answer: bool) -> str:
        if not self._control.is_inside(text.strip()):
            return self._mark_edges(text, is_answer)
        return UntrustedText("".join(c if c.isspace() else self._mark(c, is_answer) for c in text), self)

    def _mark_edges(self, text: str, is_answer: bool) -> str:
        if not isinstance(text, str) or not self._control.has_edge(text):
            return text
        for edge in self._control.edges:
            if edge in text:
                text = text.replace(edge, self._mark(edge, is_answer))
        return UntrustedText(text, self)

    def _mark(self, character: str, is_answer: bool) -> str:
        if (character, is_answer) not in self._marks:
            mark = next(self._free, None)
            if mark is None:
                raise RequestError("the messages hold every private-use character there is: leave some out", "messages")
            self._marks[character, is_answer] = mark
            self._restored[mark] = character
            if is_answer:
                self._of_answers.add(mark)
        return self._marks[character, is_answer]

    def restore(self, text: str) -> str:
        """The text without marks, of the same length."""
        text = str.__str__(text)
        for mark, character in self._restored.items():  # few, so faster than `str.translate`
            text = text.replace(mark, character)
        return text

    def is_answer(self, text: str) -> bool:
        """Whether all marks in the text are from an assistant's message."""
        return all(character not in self._restored or character in self._of_answers for character in text)


class UntrustedText(str):
    """Marked text that behaves as if unmarked when a template searches or compares it; slices of it stay marked."""

    _marks: Marks
    _unmarked: str | None

    def __new__(cls, text: str, marks: Marks) -> UntrustedText:
        made = super().__new__(cls, text)
        made._marks, made._unmarked = marks, None
        return made

    def __str__(self) -> str:
        return self

    def _restored(self) -> str:
        if self._unmarked is None:
            self._unmarked = self._marks.restore(self)
        return self._unmarked

    def _again(self, text: str) -> UntrustedText:
        return UntrustedText(text, self._marks)

    def __hash__(self) -> int:
        return hash(self._restored())

    def __eq__(self, other: object) -> bool:
        return self._restored() == _restored(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and str.__contains__(self._restored(), _restored(part))

    def __add__(self, other: str) -> UntrustedText:
        return self._again(str.__add__(self, other))

    def __radd__(self, other: str) -> UntrustedText:
        return self._again(str.__add__(other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> UntrustedText:
        return self._again(str.__getitem__(self, key))

    def __iter__(self) -> Iterator[str]:
        return (self._again(character) for character in str.__iter__(self))

    def join(self, parts: Iterable[str]) -> UntrustedText:
        return self._again(str.join(self, parts))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._pieces(self._restored().split(_restored(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._pieces(self._restored().rsplit(_restored(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return [self._again(line) for line in str.splitlines(self, keepends)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._three(self._restored().partition(_restored(sep)))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._three(self._restored().rpartition(_restored(sep)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> UntrustedText:  # type: ignore[override]
        if not old:
            return self._again(str.replace(self, old, new, count))
        return self._again(new.join(self.split(old, count)))

    def strip(self, chars: str | None = None) -> UntrustedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> UntrustedText:
        return self[len(self) - len(self._restored().lstrip(_restored(chars))) :]

    def rstrip(self, chars: str | None = None) -> UntrustedText:
        return self[: len(self._restored().rstrip(_restored(chars)))]

    def removeprefix(self, prefix: str) -> UntrustedText:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> UntrustedText:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def _pieces(self, pieces: list[str], sep: str | None) -> list[str]:
        """The same slices of the marked text, where characters have the same positions."""
        made, at = [], 0
        restored = self._restored()
        for piece in pieces:
            at = restored.index(piece, at) if sep is None else at
            made.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return list[str](made)

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        before, between = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:before], self[before:between], self[between:]


def _restored(value: Any) -> Any:
    return value._restored() if isinstance(value, UntrustedText) else value


def _looking(name: str) -> Callable[..., Any]:
    look = getattr(str, name)

    def method(self: UntrustedText, *arguments: Any) -> Any:
        """As in `str`, on the text without marks."""
        return look(self._restored(), *(tuple(map(_restored, a)) if isinstance(a, tuple) else _restored(a) for a in arguments))

    return method


def _changing(name: str) -> Callable[..., UntrustedText]:
    change = getattr(str, name)

    def method(self: UntrustedText, *arguments: Any) -> UntrustedText:
        """As in `str`; marks stay."""
        return UntrustedText(change(self, *arguments), self._marks)

    return method


_LOOKING = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "__lt__", "__le__", "__gt__", "__ge__")
_CHANGING = ("lower", "upper", "title", "capitalize", "swapcase", "casefold", "expandtabs", "zfill", "center", "ljust", "rjust", "__mul__")
for _name in _LOOKING:
    setattr(UntrustedText, _name, _looking(_name))
for _name in _CHANGING:
    setattr(UntrustedText, _name, _changing(_name))


def joined(parts: Iterable[str]) -> str:
    """The parts joined; untrusted if one of them is."""
    several = list(parts)
    text = "".join(several)
    untrusted = next((part for part in several if isinstance(part, UntrustedText)), None)
    return text if untrusted is None else UntrustedText(text, untrusted._marks)


def _texts(values: Any, is_key: bool = False) -> Iterator[tuple[str, bool]]:
    """All texts in values of JSON types, except known roles and types; and whether each is a key."""
    if isinstance(values, str):
        yield values, is_key
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts(key, is_key=True)
            if not _is_known(key, value):
                yield from _texts(value)
    elif isinstance(values, Iterable):
        for value in values:
            yield from _texts(value)


def _is_known(key: Any, value: Any) -> bool:
    return isinstance(value, str) and value in _KNOWN.get(key, ())
