"""What a chat template gets of tools: a system message where it has no place for them, and the ids that it takes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.conversation import Calls, calls_as_json
from server.tools.layout import ToolFormat
from server.tools.writing import written

Message = Mapping[str, Any]

_LENGTH = re.compile(r"\{random:(\d+)\}")  # an id of nothing but that many characters


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> list[Message]:
    """The messages, with the tools and how to call them in the system message, which becomes the first one."""
    text = _tools_text(tools, tool_format)
    if messages and messages[0].get("role") == "system":
        first, rest = messages[0], messages[1:]
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".lstrip()}, *rest]
    return [{"role": "system", "content": text}, *messages]


def written_calls(tool_format: ToolFormat, calls: Calls) -> str:
    """Earlier calls as the text that the model is to write; JSON where their arguments are no object."""
    if all(isinstance(arguments, Mapping) for _, arguments in calls):
        return written(tool_format, calls)
    return calls_as_json(calls)


def with_call_ids(messages: Sequence[Message], tool_format: ToolFormat) -> list[Message]:
    """The messages, with ids of calls as templates of this format require them: Mistral's take 9 letters and digits.

    Ids that aren't such, from other servers, become some that are; equal ones become equal.
    """
    length = _LENGTH.fullmatch(tool_format.call_id)
    if length is None:
        return list(messages)

    def changed(call_id: str) -> str:
        is_such = len(call_id) == int(length[1]) and call_id.isascii() and call_id.isalnum()
        return call_id if is_such else hashlib.sha256(call_id.encode()).hexdigest()[: int(length[1])]

    made: list[Message] = []
    for message in messages:
        again = dict(message)
        if "tool_call_id" in again:
            again["tool_call_id"] = changed(again["tool_call_id"])
        if "tool_calls" in again:
            again["tool_calls"] = [{**call, "id": changed(call["id"])} for call in again["tool_calls"]]
        made.append(again)
    return made


def _tools_text(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    several = "Call several by writing one after another." if tool_format.parallel else "Call one at a time."
    return (
        f"You can call these tools:\n{functions}\n\n"
        "To call a tool, write only this, with the tool's name and its arguments:\n"
        f"{written(tool_format, [('NAME', {'ARGUMENT': 'VALUE'})])}\n{several}\n"
        "Call a tool only where it helps; else answer in words."
    )
