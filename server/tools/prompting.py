"""Tools in the words of a system message, for models whose chat template has no place for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.conversation import Calls, calls_as_json
from server.tools.layout import ToolFormat
from server.tools.writing import written

Message = Mapping[str, Any]


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


def _tools_text(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    several = "Call several by writing one after another." if tool_format.parallel else "Call one at a time."
    return (
        f"You can call these tools:\n{functions}\n\n"
        "To call a tool, write only this, with the tool's name and its arguments:\n"
        f"{written(tool_format, [('NAME', {'ARGUMENT': 'VALUE'})])}\n{several}\n"
        "Call a tool only where it helps; else answer in words."
    )
