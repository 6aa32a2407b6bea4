"""A checkpoint's `response_template` (tokenizer_config.json, transformers from 5.13 on) as a format of ours.

It describes regions of an answer by what opens and closes them: texts, or regular expressions. Read are those of JSON
whose expressions are texts with optional white space and the tool's name in between.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from server.tools.layout import Element, JsonArguments, JsonCall, Layout, Name, ToolFormat
from server.tools.reasoning import ReasoningFormat

_NAME = "response_template"
_PIECE = re.compile(r"(?P<space>\\s[*+])|(?P<name>\(\?P<name>[^()]*\))|\\(?P<escaped>\W)|(?P<plain>[^\\.^$*+?{}\[\]|()])", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{content(?:\.(\w+))?\}")


def calls_of(template: Any, special_tokens: Collection[str], family: ToolFormat | None) -> ToolFormat | None:
    """The template's format of tool calls; None where it has none that is read. Its layout goes before those of
    `family`, which are read too. `special_tokens` at the end of a call are left out: the text ends before them."""
    region = _region(template, "tool_calls")
    if region is None or region.get("content") != "json":
        return None
    opening, closing = _anchor(region, "open"), _anchor(region, "close")
    layout = None if not opening or closing is None else _layout(opening, _without_end(closing, special_tokens), region.get("transform"))
    if layout is None:
        return None
    if family is None:
        return ToolFormat(_NAME, (layout,))
    return replace(family, name=_NAME, layouts=(layout, *(other for other in family.layouts if other != layout)))


def reasoning_of(template: Any) -> ReasoningFormat | None:
    """The template's markers of reasoning; None where it has none, or none that are texts."""
    region = _region(template, "reasoning_content") or _region(template, "thinking")
    opening, closing = (None, None) if region is None else (_anchor(region, "open"), _anchor(region, "close"))
    match opening, closing:
        case [str(begin)], [str(end)]:
            return ReasoningFormat(_NAME, begin.strip(), end.strip())
    return None


def _region(template: Any, name: str) -> Mapping[str, Any] | None:
    fields = template.get("fields") if isinstance(template, Mapping) else None
    region = fields.get(name) if isinstance(fields, Mapping) else None
    return region if isinstance(region, Mapping) else None


def _anchor(region: Mapping[str, Any], key: str) -> list[str | Name] | None:
    """The texts and the name that open or close a region; None where they are anything else."""
    text, pattern = region.get(key), region.get(f"{key}_pattern")
    if isinstance(text, str) and text.strip():
        return [text.strip()]
    return _pieces(pattern) if isinstance(pattern, str) else None


def _pieces(pattern: str) -> list[str | Name] | None:
    pieces: list[str | Name] = [""]
    at = 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None:
            return None
        match found.lastgroup:
            case "space":
                pieces.append("")
            case "name":
                pieces += [Name(), ""]
            case _:
                pieces[-1] = f"{pieces[-1]}{found['escaped'] or found['plain']}"
        at = found.end()
    stripped = [piece if isinstance(piece, Name) else piece.strip() for piece in pieces]
    return [piece for piece in stripped if piece]


def _without_end(closing: list[str | Name], special_tokens: Collection[str]) -> list[str | Name]:
    last = closing[-1] if closing else None
    end = next((token for token in special_tokens if isinstance(last, str) and last.endswith(token)), None)
    # A closing text that is a special token as a whole closes the call itself.
    if end is None or not isinstance(last, str) or last == end:
        return closing
    return [*closing[:-1], last.removesuffix(end)]


def _layout(opening: list[str | Name], closing: list[str | Name], transform: Any) -> Layout | None:
    ends = tuple(text for text in closing if isinstance(text, str))
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if len(ends) < len(closing) or not isinstance(opening[0], str):
        return None
    if Name() in opening:  # content is the arguments alone
        is_meant = function == {"name": "{name}", "arguments": "{content}"} and opening.count(Name()) == 1
        call: tuple[Element, ...] = (*opening[1:], JsonArguments())
        return Layout(call, (opening[0],), end=ends) if is_meant else None
    keys = _keys(function)
    return None if keys is None else Layout((*opening[1:], JsonCall(keys[0], (keys[1],))), (opening[0],), end=ends)


def _keys(function: Any) -> tuple[str, str] | None:
    """The keys of a call's name and arguments in the region's JSON."""
    if function == "{content}":
        return "name", "arguments"
    if not isinstance(function, Mapping):
        return None
    found = [_PLACEHOLDER.fullmatch(value) for key in ("name", "arguments") if isinstance(value := function.get(key), str)]
    keys = [match[1] for match in found if match is not None and match[1]]
    return (keys[0], keys[1]) if len(keys) == 2 else None
