"""`response_format` and its like: what a request holds its answers to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.request import RequestError, StructuredOutputs
from server.openai.errors import quoted
from server.openai.strict import StrictModel, describe

# vLLM's names in `structured_outputs`, and the older ones of fields, with those of `StructuredOutputs`.
_KINDS = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_OLDER = {f"guided_{name}": kind for name, kind in _KINDS.items() if name != "json_object"}
_JSON = {"type": "object", "additionalProperties": True}


class StructuredFields(StrictModel):
    """At most one of them."""

    response_format: Any = describe(
        type="object",
        description="text, json_object, or json_schema with {'json_schema': {'name': ..., 'schema': ...}}: the answer is such JSON",
    )
    structured_outputs: Any = describe(type="object", description="one of json (a schema), regex, choice, grammar (Lark), json_object")
    guided_json: Any = describe(description="the older name of structured_outputs.json")
    guided_regex: Any = describe(description="the older name of structured_outputs.regex")
    guided_choice: Any = describe(description="the older name of structured_outputs.choice")
    guided_grammar: Any = describe(description="the older name of structured_outputs.grammar")

    def wanted_structure(self) -> StructuredOutputs | None:
        """What answers are held to; None: to nothing. Raises `RequestError` that names the field."""
        found = [(name, _made(name, kind, value)) for name, kind in _OLDER.items() if (value := getattr(self, name)) is not None]
        if self.structured_outputs is not None:
            found.append(("structured_outputs", _of_kinds(self.structured_outputs)))
        if self.response_format is not None and (of_format := _of_response_format(self.response_format)) is not None:
            found.append(("response_format", of_format))
        if len(found) > 1:
            raise RequestError(f"{' and '.join(name for name, _ in found)} are given: an answer can be held to one of them", found[0][0])
        return found[0][1] if found else None


def _of_kinds(given: Any) -> StructuredOutputs:
    if not isinstance(given, Mapping):
        raise RequestError(
            f"structured_outputs is {quoted(given)}: it must be an object with one of {', '.join(_KINDS)}", "structured_outputs"
        )
    kinds = {name: value for name, value in given.items() if value not in (None, False)}
    if len(kinds) != 1 or (name := next(iter(kinds))) not in _KINDS:
        names = ", ".join(map(quoted, kinds)) or "nothing"
        raise RequestError(f"structured_outputs has {names}: give one of {', '.join(_KINDS)}", "structured_outputs")
    return _made("structured_outputs", _KINDS[name], kinds[name])


def _of_response_format(given: Any) -> StructuredOutputs | None:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise RequestError(
            f"response_format is {quoted(given)}: its type must be text, json_object or json_schema", "response_format", "invalid_value"
        )
    holder = given.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            "response_format.json_schema has no schema: send {'name': ..., 'schema': {...}}", "response_format.json_schema", "invalid_value"
        )
    return _made("response_format", "json_schema", schema)


def _made(param: str, kind: str, value: Any) -> StructuredOutputs:
    try:
        return StructuredOutputs(**{kind: value})
    except RequestError as error:
        raise RequestError(str(error), param, error.code) from error


def as_grammar(wanted: StructuredOutputs) -> str | None:
    """The same as a rule's body in Lark, to stand after other text; None for a grammar, which has a start of its
    own."""
    if wanted.json_object:
        return "%json " + json.dumps(_JSON)
    if wanted.json_schema is not None:
        return "%json " + wanted.json_schema
    if wanted.regex is not None:
        return "/" + wanted.regex.replace("/", "\\/") + "/"
    return " | ".join(map(json.dumps, wanted.choice)) if wanted.choice else None
