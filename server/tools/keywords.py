"""Reader of arguments as in a call of Python: see `KeywordArguments`."""

from __future__ import annotations

import json
from collections.abc import Callable

from server.tools.characters import END, Characters, Damaged, Parsing
from server.tools.values import Emit, read_value

_MAX_KEY = 64  # characters


def read_keywords(text: Characters, on_open: Callable[[], None], emit: Emit) -> Parsing[None]:
    """The arguments before a closing bracket, emitted as one JSON object. `on_open` is called where they can be nothing
    else: after the first equals sign, or where there are none. Raises `Damaged` for anything else."""
    before = "{"
    while (yield from text.peek()) != ")":
        key = yield from _read_key(text)
        if before == "{":
            on_open()
        emit(before + json.dumps(key, ensure_ascii=False) + ": ")
        before = ", "
        yield from text.space()
        yield from read_value(text, emit, python=True)
        yield from text.space()
        if (yield from text.peek()) != ")":
            yield from text.expect(",")
            yield from text.space()
    if before == "{":
        on_open()
    emit("{}" if before == "{" else "}")


def _read_key(text: Characters) -> Parsing[str]:
    """A keyword, with its equals sign."""
    key = ""
    while len(key) < _MAX_KEY and (character := (yield from text.peek())) != END and (key + character).isidentifier():
        key += yield from text.take()
    if not key:
        raise Damaged
    yield from text.space()
    yield from text.expect("=")
    return key
