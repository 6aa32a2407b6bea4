"""`tools` and `tool_choice` of a chat: what a request may combine, and what has to be enforced while sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Tag

from jaxinfer.request import RequestError
from server.openai.errors import quoted
from server.openai.messages import Tool
from server.openai.strict import NonEmpty, StrictModel, one_of


class NamedFunction(StrictModel):
    place = "tool_choice.function"

    name: NonEmpty


class NamedTool(StrictModel):
    """The one tool that the answer has to call."""

    place = "tool_choice"

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedTool, Tag("<tool>")],
    one_of("'none', 'auto', 'required' or an object that names a function", str="<string>", dict="<tool>"),
]


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises `RequestError` for tools of the same name, and for a choice that is none of them."""
    first_with: dict[str, int] = {}
    for number, tool in enumerate(tools):
        name = tool.function.name
        if first_with.setdefault(name, number) != number:
            message = f"tools[{number}] has the name {quoted(name)}, as tools[{first_with[name]}] has: give each tool its own"
            raise RequestError(message, "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in first_with:
        message = f"tool_choice names {quoted(choice.function.name)}, which is none of the tools: name one of them, or send it in tools"
        raise RequestError(message, "tool_choice")
    if choice == "required" and not tools:
        raise RequestError("tool_choice is 'required' without tools: send tools, or leave it out", "tool_choice")


def enforced_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> str | None:
    """What a grammar has to promise: 'required', a tool's name, or 'auto' where arguments of strict tools have to keep
    to their schema; None for nothing."""
    if isinstance(choice, NamedTool):
        return choice.function.name
    if choice == "required":
        return choice
    return "auto" if any(tool.strict or tool.function.strict for tool in tools) else None
