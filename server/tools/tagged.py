"""Reader of arguments in elements of their own, as Qwen3-Coder writes them: see `TaggedArguments`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from server.tools.characters import Characters, Parsing
from server.tools.layout import TaggedArguments
from server.tools.values import Emit

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def is_text(schema: Any) -> bool:
    """Whether a parameter with this JSON schema is text alone, which is written as it is."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum")
    return schema.get("type") == "string" or (isinstance(values, list) and all(isinstance(value, str) for value in values))


def read_tagged(
    text: Characters, part: TaggedArguments, schema: Mapping[str, Any], on_open: Callable[[], None], emit: Emit
) -> Parsing[None]:
    """The elements up to their end, emitted as one JSON object. `on_open` is called before the first. Raises `Damaged`
    for anything else."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    before = "{"
    while True:
        yield from text.space()
        found = yield from text.one_of((part.before_key, part.end))
        if before == "{":
            on_open()
        if found == part.end:
            emit("{}" if before == "{" else "}")
            return
        key: list[str] = []
        yield from _read_until(text, (part.after_key,), key.append)
        emit(before + json.dumps("".join(key), ensure_ascii=False) + ": ")
        before = ", "
        if is_text(properties.get("".join(key))):
            emit('"')
            yield from _read_content(text, part.close, lambda piece: emit(json.dumps(piece, ensure_ascii=False)[1:-1]))
            emit('"')
        else:
            value: list[str] = []
            yield from _read_content(text, part.close, value.append)
            emit(_as_json("".join(value)))


def _read_content(text: Characters, close: str, emit: Emit) -> Parsing[None]:
    if (yield from text.peek()) == "\n":
        yield from text.take()
    yield from _read_until(text, (close, "\n" + close), emit)


def _read_until(text: Characters, stops: tuple[str, ...], emit: Emit) -> Parsing[None]:
    """Emits what comes before one of the stops, and takes that."""
    held = ""
    while held not in stops:
        held += yield from text.take()
        while held and not any(stop.startswith(held) for stop in stops):
            emit(held[0])
            held = held[1:]


def _as_json(value: str) -> str:
    """A value as JSON text: itself where it is JSON, the same value where it is a word of Python's, else a string."""
    stripped = value.strip()
    if stripped in _PYTHON_WORDS:
        return _PYTHON_WORDS[stripped]
    try:
        json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return stripped


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity are none of JSON's
