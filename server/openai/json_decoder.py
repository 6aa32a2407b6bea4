"""JSON of large bodies, parsed piece by piece: Python's own decoder parses all of it without letting another thread
run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONArray, JSONDecodeError  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

_PIECE = 16 * 1024  # characters of integers that are parsed at once: half a millisecond
_INTEGERS = re.compile(r"(?:[ \t\n\r]*-?\d+[ \t\n\r]*,)+", re.ASCII)
_SPACE = re.compile(r"[ \t\n\r]*")


class PiecewiseDecoder(json.JSONDecoder):
    """Returns what `json.JSONDecoder` returns. Objects and lists are parsed in Python, strings and runs of integers are
    not: prompts of token ids are the longest lists."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self.parse_array = _read_array
        self.scan_once = py_make_scanner(self)


def _read_array(text_and_start: tuple[str, int], scan_once: Callable[[str, int], tuple[Any, int]]) -> tuple[list[Any], int]:
    """The list that begins there, after its bracket, and where it ends."""
    text, at = text_and_start
    values: list[Any] = []
    while (run := _INTEGERS.match(text, at, at + _PIECE)) is not None:
        try:
            values += json.loads(f"[{run.group()[:-1]}]")
        except JSONDecodeError:  # such as 01: the rest is parsed like any list, which finds the position
            break
        at = run.end()
    if values and text.startswith("]", close := _SPACE.match(text, at).end()):  # type: ignore[union-attr]
        raise JSONDecodeError("Expecting value", text, close)
    rest, end = JSONArray((text, at), scan_once)
    return values + rest, end
