"""`jaxinfer demo`: `generate` with a built-in prompt, and a report of what ran where."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from typing import TextIO

from jaxinfer.config import flat_fields
from server.cli import generate
from server.flags import add_flags

PROMPT = "Explain in a few sentences why the sky is blue."
WIDEST = 80  # columns
_PREFILL_TOKENS = 128  # one prefill program: a longer prompt takes several chunks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As `generate`'s, with an optional prompt."""
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="the prompt (default: %(default)s)")
    parser.set_defaults(stats=True)
    generate.add_generation_flags(parser)
    add_flags(parser, "engine", flat_fields())


def run(arguments: argparse.Namespace) -> int:
    """As `generate`'s, with lines no wider than the terminal."""
    if not hasattr(arguments, "prefill_chunk_size") and not hasattr(arguments, "prefill_buckets"):
        arguments.prefill_chunk_size, arguments.prefill_buckets = _PREFILL_TOKENS, (_PREFILL_TOKENS,)
    return generate.run(arguments, WordWrap(sys.stdout, min(shutil.get_terminal_size().columns, WIDEST)).write)


class WordWrap:
    """Breaks lines of streamed text between words.

    A word is written once its end is known: end the text with a newline."""

    def __init__(self, file: TextIO, width: int) -> None:
        """`width`: most columns of a line that has more than one word."""
        self._file = file
        self._width = width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Add some of the text."""
        *pieces, self._word = re.split(r"(\s)", self._word + text)
        for word, space in zip(pieces[::2], pieces[1::2], strict=True):
            self._write_word(word, space)
        self._file.flush()

    def _write_word(self, word: str, space: str) -> None:
        if self._column and self._column + len(word) > self._width:
            self._file.write("\n")
            self._column = 0
        self._file.write(word)
        self._column += len(word)
        if space == "\n" or self._column >= self._width:
            self._file.write("\n")
            self._column = 0
        elif self._column:
            self._file.write(space)
            self._column += len(space)
