"""What a model's text turns out to be, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A tool is called; its arguments follow."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """More of the arguments' JSON text, of the call that was opened last."""

    text: str


AnswerEvent = ReasoningText | ContentText | CallOpened | ArgumentText
