"""Parsing text that comes in pieces, a character at a time: generators that are sent each character.

What they make of a text can't depend on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Parsing = Generator[None, str, T]

END = ""  # is sent after the last character
SPACE = " \t\r\n"


class Damaged(Exception):
    """The text is not what the reader reads."""


class Characters:
    """The characters sent so far, one of which may be looked at before it is taken."""

    def __init__(self) -> None:
        self._ahead: str | None = None

    @property
    def has_ahead(self) -> bool:
        """Whether the last character that was sent is not taken."""
        return self._ahead is not None

    def peek(self) -> Parsing[str]:
        """The next character, which stays; `END` where there is none."""
        if self._ahead is None:
            self._ahead = yield
        return self._ahead

    def take(self) -> Parsing[str]:
        """The next character. Raises `Damaged` where there is none."""
        character, self._ahead = self._ahead, None
        if character is None:
            character = yield
        if character == END:
            raise Damaged
        return character

    def space(self) -> Parsing[None]:
        """Takes white space, if any."""
        while (yield from self._next_is_space()):
            self._ahead = None

    def _next_is_space(self) -> Parsing[bool]:
        character = yield from self.peek()
        return character != END and character in SPACE

    def expect(self, text: str) -> Parsing[None]:
        """Takes the text. Raises `Damaged` where another one comes."""
        for expected in text:
            if (yield from self.peek()) != expected:
                raise Damaged
            self._ahead = None

    def one_of(self, texts: Sequence[str]) -> Parsing[str]:
        """Takes the one of the texts that comes; none of them begins another. Raises `Damaged` where none comes."""
        taken = ""
        while taken not in texts:
            character = yield from self.peek()
            if character == END or not any(text.startswith(taken + character) for text in texts):
                raise Damaged
            taken, self._ahead = taken + character, None
        return taken

    def longest_of(self, texts: Sequence[str]) -> Parsing[str]:
        """Takes as much as one of the texts begins with, which must be one of them. Raises `Damaged` else."""
        taken = ""
        while True:
            character = yield from self.peek()
            if character == END or not any(text.startswith(taken + character) for text in texts):
                break
            taken, self._ahead = taken + character, None
        if taken not in texts:
            raise Damaged
        return taken
