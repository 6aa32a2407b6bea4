"""Tool calls written as a model would write them, in the first layout of a format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from server.tools.layout import CallIndex, Element, JsonArguments, JsonCall, KeywordArguments, Name, TaggedArguments, ToolFormat

_PYTHON_WORDS = {True: "True", False: "False", None: "None"}


def written(tool_format: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of calls, each of a name and its arguments, which are values of JSON."""
    layout = tool_format.layouts[0]
    begin, end = "".join(layout.begin), "".join(layout.end)
    numbers = count()
    texts = ["".join(_part(part, name, arguments, next(numbers)) for part in layout.call) for name, arguments in calls]
    if layout.between is None:
        return "\n".join(begin + text + end for text in texts)
    return begin + layout.between.join(texts) + end


def _part(part: Element, name: str, arguments: Mapping[str, Any], number: int) -> str:
    match part:
        case str():
            return part
        case Name():
            return name
        case CallIndex():
            return str(number)
        case JsonArguments():
            return _json(arguments)
        case JsonCall(name_key, argument_keys):
            return _json({name_key: name, argument_keys[0]: arguments})
        case KeywordArguments():
            return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
        case TaggedArguments(before_key, after_key, close, end):
            elements = (f"{before_key}{key}{after_key}\n{_text(value)}\n{close}\n" for key, value in arguments.items())
            return "\n" + "".join(elements) + end
        case _:
            raise ValueError(f"no first layout has {part}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_json(key)}: {_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return _PYTHON_WORDS[value] if value is None or isinstance(value, bool) else _json(value)
