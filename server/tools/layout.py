"""What a model writes to call tools, as data: `parser.py` reads it and `grammar.py` writes a grammar of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """The tool's name, as it is."""


@dataclass(frozen=True, slots=True)
class CallIndex:
    """The call's number, in digits."""


@dataclass(frozen=True, slots=True)
class WrittenId:
    """The call's id, as the model made it up: letters and digits."""

    length: int


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments as a JSON object."""


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A JSON object of name and arguments. The first key of each is the one that a grammar asks for; others are read
    too. `ignored` keys may hold anything."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ignored: tuple[str, ...] = ("id", "type")


@dataclass(frozen=True, slots=True)
class KeywordArguments:
    """Arguments as in a call of Python, with literals as values: `a="x", b=[1, None]`."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """An element for each argument, then `end`. A string is written without quotes, other values as JSON; a line break
    after the opening tag and one before the closing tag are no part of it."""

    before_key: str
    after_key: str
    close: str
    end: str


Element = str | Name | CallIndex | WrittenId | JsonArguments | JsonCall | KeywordArguments | TaggedArguments


@dataclass(frozen=True, slots=True)
class Layout:
    """`begin`, a call, as many more as there are with `between` before each, `end`. White space may stand before each
    text, name or value.

    `between` None: one call, then `end`.
    """

    call: tuple[Element, ...]
    begin: tuple[str, ...] = ()
    between: str | None = None
    end: tuple[str, ...] = ()

    @property
    def is_marked(self) -> bool:
        """Whether it begins with more than punctuation. Others are read only where an answer begins, or right after
        another call: elsewhere they are much more likely text."""
        return bool(self.begin) and len(self.begin[0]) > 1

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that is always the same."""
        between = () if self.between is None else (self.between,)
        return (*self.begin, *(part for part in self.call if isinstance(part, str)), *between, *self.end)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models calls tools.

    `layouts`: the first is what its models are trained to write, and what a grammar asks for; the others are read too.
    `signs`: a chat template that has all texts of one of these is of this family. `call_id`: the form of a call's id;
    {random:N} is N letters and digits, {name} and {index} are what the model wrote. `parallel`: whether its models
    call several tools in one answer.
    """

    name: str
    layouts: tuple[Layout, ...]
    signs: tuple[tuple[str, ...], ...] = ()
    call_id: str = "call_{random:24}"
    parallel: bool = True

    @property
    def texts(self) -> frozenset[str]:
        """Every fixed text of every layout."""
        return frozenset(text for layout in self.layouts for text in layout.texts)
