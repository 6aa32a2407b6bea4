"""Readers of values, JSON's or Python's literals: they emit JSON text, as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable

from server.tools.characters import END, Characters, Damaged, Parsing

Emit = Callable[[str], None]

MAX_DEPTH = 64  # values in each other, as in a request's body
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = _WORDS | {"True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", '"': '\\"', "\\": "\\\\", "/": "/", "'": "'"}
_DIGITS = "0123456789"


def read_value(text: Characters, emit: Emit, *, python: bool = False, depth: int = 0) -> Parsing[None]:
    """One value, emitted as JSON text. `python`: also of Python's literals strings in either quotes, True, False and
    None. Line breaks in strings, which JSON forbids and models write, are escaped. Raises `Damaged` for anything else.
    """
    first = yield from text.peek()
    if first == "{" or first == "[":
        if depth == MAX_DEPTH:
            raise Damaged
        yield from _read_container(text, emit, python, depth + 1)
    elif first == '"' or (python and first == "'"):
        yield from read_string(text, emit, python=python)
    elif first == "-" or (first != END and first in _DIGITS):
        yield from _read_number(text, emit)
    else:
        words = _PYTHON_WORDS if python else _WORDS
        emit(words[(yield from text.one_of(tuple(words)))])


def _read_container(text: Characters, emit: Emit, python: bool, depth: int) -> Parsing[None]:
    opening = yield from text.take()
    closing = "}" if opening == "{" else "]"
    emit(opening)
    yield from emit_space(text, emit)
    is_first = True
    while (yield from text.peek()) != closing or not is_first:
        if opening == "{":
            yield from read_string(text, emit, python=python)
            yield from emit_space(text, emit)
            yield from text.expect(":")
            emit(":")
            yield from emit_space(text, emit)
        yield from read_value(text, emit, python=python, depth=depth)
        yield from emit_space(text, emit)
        if (yield from text.peek()) == closing:
            break
        yield from text.expect(",")
        emit(",")
        yield from emit_space(text, emit)
        is_first = False
    yield from text.expect(closing)
    emit(closing)


def emit_space(text: Characters, emit: Emit) -> Parsing[None]:
    """Emits white space, if any."""
    while (character := (yield from text.peek())) != END and character in " \t\r\n":
        emit((yield from text.take()))


def read_string(text: Characters, emit: Emit, *, python: bool = False) -> Parsing[None]:
    """A string with its quotes, emitted as JSON."""
    quote = yield from text.take()
    if quote != '"' and not (python and quote == "'"):
        raise Damaged
    emit('"')
    while (character := (yield from text.take())) != quote:
        if character == "\\":
            yield from _read_escape(text, emit, python)
        elif character < " " or character == '"':
            emit(json.dumps(character)[1:-1])
        else:
            emit(character)
    emit('"')


def _read_escape(text: Characters, emit: Emit, python: bool) -> Parsing[None]:
    kind = yield from text.take()
    if kind == "u":
        emit("\\u" + (yield from _hexadecimal(text, 4)))
    elif not python:
        if kind not in _ESCAPES:
            raise Damaged
        emit("\\" + kind)
    elif kind in "xU":
        code = int((yield from _hexadecimal(text, 2 if kind == "x" else 8)), 16)
        if code > 0x10FFFF:
            raise Damaged
        emit(json.dumps(chr(code))[1:-1])
    elif kind != "\n":  # which Python leaves out
        emit(_PYTHON_ESCAPES.get(kind) or "\\\\" + json.dumps(kind, ensure_ascii=False)[1:-1])


def _hexadecimal(text: Characters, length: int) -> Parsing[str]:
    digits = ""
    while len(digits) < length:
        digit = yield from text.take()
        if digit not in "0123456789abcdefABCDEF":
            raise Damaged
        digits += digit
    return digits


def _read_number(text: Characters, emit: Emit) -> Parsing[None]:
    if (yield from text.peek()) == "-":
        emit((yield from text.take()))
    if (yield from text.peek()) == "0":
        emit((yield from text.take()))
    else:
        yield from _read_digits(text, emit)
    if (yield from text.peek()) == ".":
        emit((yield from text.take()))
        yield from _read_digits(text, emit)
    if (yield from text.peek()) in ("e", "E"):
        emit((yield from text.take()))
        if (yield from text.peek()) in ("+", "-"):
            emit((yield from text.take()))
        yield from _read_digits(text, emit)


def _read_digits(text: Characters, emit: Emit) -> Parsing[None]:
    digit = yield from text.take()
    if digit not in _DIGITS:
        raise Damaged
    emit(digit)
    while (digit := (yield from text.peek())) != END and digit in _DIGITS:
        emit((yield from text.take()))
