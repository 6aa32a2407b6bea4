"""JSON texts from untrusted clients. What would take long to parse is refused first, because nothing else runs
meanwhile.

Python parses a string at once, while holding the interpreter's lock. Long strings are fast, unless they are full of
escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from server.openai.errors import ApiError
from server.openai.json_decoder import PiecewiseDecoder

MAX_VALUES = 300_000  # numbers, strings, lists and objects of one text: 10 ms of parsing, as much of checking
MAX_OBJECTS = 10_000  # lists and objects among them, each of which takes as long as thirty numbers
MAX_KEYS = 20_000  # of all objects together
MAX_STRINGS = 80_000  # keys among them
MAX_BACKSLASHES = 400_000  # each piece of a string between two escapes is a string of its own at first
MAX_KEY = 256  # characters
MAX_DEPTH = 64  # of nested lists and objects
_MOST = {"values": MAX_VALUES, "objects": MAX_OBJECTS, "keys": MAX_KEYS, "strings": MAX_STRINGS, "backslashes": MAX_BACKSLASHES}
_SMALL = 64 * 1024  # bytes that can't hold too many values
_PIECE = 64 * 1024  # bytes that are scanned at once
_BACKSLASHES = re.compile(rb"\\*")


def read_json(raw: bytes, what: str) -> object:
    """The value of a JSON text. Raises `ApiError` 400 for anything else, and for what exceeds the limits above."""
    try:
        check_structure(raw, what)
        return (_SMALL_BODIES if len(raw) <= _SMALL else _LARGE_BODIES).decode(raw.decode("utf-8-sig"))
    except _LongKey as error:
        raise ApiError(400, f"{what} has a key of {error.length} characters: at most {MAX_KEY}", code="invalid_json") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number too long
        raise ApiError(400, f"{what} is not valid JSON: {error}", code="invalid_json") from None


class _LongKey(Exception):
    def __init__(self, length: int) -> None:
        self.length = length


def _number(text: str) -> int | float:
    """JSON has one kind of number: 3.0 is as integral as 3."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for key, _ in pairs:
        if len(key) > MAX_KEY:
            raise _LongKey(len(key))
    return dict(pairs)


_HOOKS: dict[str, Any] = {"parse_float": _number, "object_pairs_hook": _object}
_SMALL_BODIES, _LARGE_BODIES = json.JSONDecoder(**_HOOKS), PiecewiseDecoder(**_HOOKS)


def check_structure(raw: bytes, what: str) -> None:
    """Raises `ApiError` for a text of too many values, or too deep. Invalid JSON is not detected here."""
    if len(raw) <= _SMALL and raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    is_outside, counts, depth, deepest = True, dict.fromkeys(_MOST, 0.0), 0, 0
    for piece in _pieces(raw):
        if num_backslashes := piece.count(b"\\"):  # escaped backslashes first: the remaining ones escape a quote
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        runs = piece.split(b'"')
        structure = b"".join(runs[0 if is_outside else 1 :: 2]).translate(None, _NO_STRUCTURE)  # outside strings
        num_opened, num_keys = structure.count(b"[") + structure.count(b"{"), structure.count(b":")
        counts["backslashes"] += num_backslashes
        counts["strings"] += (len(runs) - 1) / 2
        counts["objects"] += num_opened
        counts["keys"] += num_keys
        counts["values"] += len(structure) - num_opened - num_keys  # a comma or an end for each
        for kind, number in counts.items():
            if number > _MOST[kind]:
                raise _too_much(what, kind, _MOST[kind])
        steps = np.cumsum(_STEPS[np.frombuffer(structure, np.uint8)], dtype=np.int32)
        deepest = max(deepest, depth + int(steps.max(initial=0)))
        depth += int(steps[-1]) if len(steps) else 0
        if deepest > MAX_DEPTH:
            raise _too_much(what, "lists and objects in each other", MAX_DEPTH)
        is_outside ^= len(runs) % 2 == 0


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Pieces of at most `_PIECE` bytes and a run of backslashes, none of which is cut: other threads run between two of
    them."""
    start = 0
    while start < len(raw):
        end = start + _PIECE
        if raw[end - 1 : end] == b"\\":
            end = _BACKSLASHES.match(raw, end).end() + 1  # type: ignore[union-attr]  # with what they escape
        yield raw[start:end]
        start = end


def _too_much(what: str, kind: str, most: int) -> ApiError:
    return ApiError(400, f"{what} has over {most} {kind}: at most {most} in one request", code="body_too_complex")


_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},:"))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
