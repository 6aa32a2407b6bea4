"""A grammar of tool calls for llguidance (its Lark dialect), from the same layouts that the parser reads.

What it lets through, the parser reads; the parser reads more: other layouts, keys and orders of arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.tools.layout import (
    CallIndex,
    Element,
    JsonArguments,
    JsonCall,
    KeywordArguments,
    Layout,
    Name,
    TaggedArguments,
    ToolFormat,
    WrittenId,
)
from server.tools.tagged import is_text

Tools = Mapping[str, Mapping[str, Any]]  # the parameters' JSON schema of each, by name

_SPACE = "SPACE: /[ \\t\\r\\n]{1,2}/\nspace: SPACE?"
_ANYTHING = "TEXT: /(?s:.*)/"
_DEFINITIONS = ("$defs", "definitions")  # that references in any part of a schema may name


def call_grammar(
    tool_format: ToolFormat, tools: Tools, special_tokens: Mapping[str, int], *, choice: str = "auto", is_parallel: bool = True
) -> str:
    """Lark text of answers in the format's first layout. `special_tokens`: ids by text; markers among them are named by
    their id. `choice`: auto (text, and calls if any come), required (nothing but calls), or the name of the one tool
    that is called, once. `is_parallel`: several calls.

    Raises `KeyError` for the name of no tool. Schemas are given on as they are: llguidance reports bad ones.
    """
    is_named = choice not in ("auto", "required")
    chosen = {choice: tools[choice]} if is_named else tools
    writer = _GrammarWriter(tool_format.layouts[0], special_tokens, is_parallel and tool_format.parallel and not is_named)
    return writer.grammar(chosen, is_auto=choice == "auto")


@dataclass(frozen=True, slots=True)
class _GrammarWriter:
    layout: Layout
    special_tokens: Mapping[str, int]
    is_parallel: bool

    def grammar(self, tools: Tools, *, is_auto: bool) -> str:
        rules = [_SPACE, self._section()]
        for number, (name, schema) in enumerate(tools.items()):
            rules += self._call(number, name, schema)
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        sections = "section (space section)*" if self.layout.between is None and self.is_parallel else "section"
        return "\n".join([*(self._with_text() if is_auto else [f"start: {sections}"]), *rules]) + "\n"

    def _with_text(self) -> list[str]:
        """Rules of text with calls in it, or none. Without a marker an answer is either."""
        several = "*" if self.is_parallel and self.layout.between is None else "?"
        if not self.layout.is_marked:
            first = re.escape(self.layout.begin[0] if self.layout.begin else "{")
            return [f"TEXT: /([^{first} \\t\\r\\n](?s:.*))?/", "start: section | TEXT"]
        if self.layout.begin[0] in self.special_tokens:
            return [_ANYTHING, f"start: TEXT (section space){several}"]
        return [_ANYTHING, f"head[lazy]: TEXT {self._text(self.layout.begin[0])}", f"start: (head after_head){several} TEXT"]

    def _section(self) -> str:
        begins = [self._text(text) for text in self.layout.begin]
        ends = [f"space {self._text(text)}" for text in self.layout.end]
        more = "" if self.layout.between is None or not self.is_parallel else f"(space {self._text(self.layout.between)} space call)*"
        after_head = " ".join([*(f"space {begin}" for begin in begins[1:]), "space" if begins else "", "call", more, *ends])
        return f"section: {' '.join(begins[:1])} after_head\nafter_head: {after_head}"

    def _call(self, number: int, name: str, schema: Mapping[str, Any]) -> list[str]:
        rules: list[str] = []
        parts = [self._part(part, f"arguments_{number}", name, schema, rules) for part in self.layout.call]
        return [f"call_{number}: {' space '.join(parts)}", *rules]

    def _part(self, part: Element, rule: str, name: str, schema: Mapping[str, Any], rules: list[str]) -> str:
        match part:
            case str():
                return self._text(part)
            case Name():
                return _quoted(name)
            case CallIndex():
                return "/[0-9]{1,3}/"
            case WrittenId(length):
                return f"/[a-zA-Z0-9]{{{length}}}/"
            case JsonArguments():
                rules.append(f"{rule}: %json {_schema_text({'type': 'object', **schema})}")
                return rule
            case JsonCall(name_key, argument_keys):
                rules.append(f"{rule}: %json {_schema_text({'type': 'object', **schema})}")
                name_pair = f"{_quoted(json.dumps(name_key))} space {_quoted(':')} space {_quoted(json.dumps(name, ensure_ascii=False))}"
                arguments = f"{_quoted(json.dumps(argument_keys[0]))} space {_quoted(':')} space {rule}"
                return f"{_quoted('{')} space {name_pair} space {_quoted(',')} space {arguments} space {_quoted('}')}"
            case KeywordArguments():
                rules += _keyword_rules(rule, schema)
                return f"{rule}_0"
            case TaggedArguments():
                rules += _tagged_rules(rule, part, schema)
                return rule

    def _text(self, text: str) -> str:
        token_id = self.special_tokens.get(text)
        return _quoted(text) if token_id is None else f"<[{token_id}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema_text(schema: Any) -> str:
    # A small model may write white space for ever where it is free.
    bounded = {"x-guidance": {"whitespace_pattern": "[ \\n]{1,2}"}, **schema} if isinstance(schema, Mapping) else schema
    return json.dumps(bounded, ensure_ascii=False)


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Each property's name, schema (with what its references may name) and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    wanted: Sequence[Any] = required if isinstance(required, list) else ()
    of_each = properties.items() if isinstance(properties, Mapping) else ()
    return [(key, {**definitions, **of_key} if isinstance(of_key, Mapping) else of_key, key in wanted) for key, of_key in of_each]


def _keyword_rules(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Rules of the arguments from each property on, before (`rule_N`) and after (`rule_after_N`) the first argument."""
    rules = []
    properties = [entry for entry in _properties(schema) if entry[0].isidentifier()]
    for number, (key, of_key, is_required) in enumerate(properties):
        following = number + 1
        rules.append(f"{rule}_value_{number}: {_quoted(key)} space {_quoted('=')} space {_python_value(of_key)}")
        first = [f"{rule}_value_{number} {rule}_after_{following}", *([] if is_required else [f"{rule}_{following}"])]
        after = [f'space "," space {rule}_value_{number} {rule}_after_{following}', *([] if is_required else [f"{rule}_after_{following}"])]
        rules += [f"{rule}_{number}: {' | '.join(first)}", f"{rule}_after_{number}: {' | '.join(after)}"]
    return [*rules, f'{rule}_{len(properties)}: ""', f'{rule}_after_{len(properties)}: ""']


def _python_value(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "boolean":
        return '("True" | "False")'
    return '"None"' if kind == "null" else f"%json {_schema_text(schema)}"


def _tagged_rules(rule: str, part: TaggedArguments, schema: Mapping[str, Any]) -> list[str]:
    rules, elements = [], []
    for number, (key, of_key, is_required) in enumerate(_properties(schema)):
        element = f"{rule}_element_{number}"
        opening = _quoted(f"{part.before_key}{key}{part.after_key}\n")
        values = of_key.get("enum") if isinstance(of_key, Mapping) else None
        if not is_text(of_key):
            rules.append(f"{element}: {opening} %json {_schema_text(of_key)} space {_quoted(part.close)} space")
        elif isinstance(values, list):
            rules.append(f"{element}: {opening} ({' | '.join(_quoted(value) for value in values)}) {_quoted(chr(10) + part.close)} space")
        else:
            rules += [f"{element}_text[suffix={_quoted(part.close)}]: /(?s:.*)/", f"{element}: {opening} {element}_text space"]
        elements.append(element if is_required else f"{element}?")
    return [f"{rule}: {' '.join([*elements, _quoted(part.end)])}", *rules]
