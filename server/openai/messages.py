"""A chat's messages and the tools it may call, as OpenAI's API has them and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from jaxinfer.request import RequestError
from server.openai.errors import quoted
from server.openai.strict import NonEmpty, StrictModel, Text, documented, one_of


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise RequestError(f"a content part's type is {kind[:40]!r}: this model reads text only", "type", "unsupported_content")
        return data


Content = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[list[TextPart], Field(min_length=1), Tag("<parts>")],
    one_of("a string or a list of text parts", str="<string>", list="<parts>", list_dict="<parts>"),
]


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _kind_of_message(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if role in ("assistant", "tool") else "<said>"


class ChatMessage(StrictModel):
    """What was said to the model."""

    unsupported = {"tool_calls": ([],), "function_call": (), "tool_call_id": (), "audio": (), "refusal": (), "annotations": ([],)}

    role: Literal["system", "developer", "user"]
    content: Content
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_roles(cls, data: Any) -> Any:
        role = data.get("role") if isinstance(data, dict) else None
        if role == "function":
            raise RequestError("role is 'function': send what a tool returned with role 'tool'", "role", "unsupported_parameter")
        if isinstance(role, str) and role not in _ROLES:
            raise RequestError(f"role is {quoted(role)}: it must be {', '.join(map(repr, _ROLES[:-1]))} or {_ROLES[-1]!r}", "role")
        return data


class CalledFunction(StrictModel):
    name: NonEmpty
    arguments: Text = Field(description="a JSON object, as text")

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if not isinstance(self.as_object(), dict):
            raise RequestError(f"arguments is {quoted(self.arguments)}: it must be a JSON object, as text", "arguments")
        return self

    def as_object(self) -> Any:
        """None where they are not JSON."""
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None


class ToolCall(StrictModel):
    id: NonEmpty
    type: Literal["function"]
    function: CalledFunction

    def for_template(self, arguments_as_text: bool) -> dict[str, Any]:
        arguments = self.function.arguments if arguments_as_text else self.function.as_object()
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class AssistantTurn(StrictModel):
    """What the model answered, or the tools that it called."""

    unsupported = {name: harmless for name, harmless in ChatMessage.unsupported.items() if name != "tool_calls"}

    role: Literal["assistant"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None

    @model_validator(mode="after")
    def _check_said_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise RequestError("content is null: it must be a string or a list of text parts where there are no tool_calls", "content")
        return self


class ToolTurn(StrictModel):
    """What a tool returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: NonEmpty
    name: Text | None = None


AnyMessage = Annotated[
    Annotated[ChatMessage, Tag("<said>")] | Annotated[AssistantTurn, Tag("<assistant>")] | Annotated[ToolTurn, Tag("<tool>")],
    Discriminator(_kind_of_message),
]


def for_template(message: ChatMessage | AssistantTurn | ToolTurn, arguments_as_text: bool = False) -> dict[str, Any]:
    """As chat templates read a message: text content, 'developer' under its older name, the arguments of calls as objects or as text."""
    content = message.content if isinstance(message.content, str | None) else "".join(part.text for part in message.content)
    fields: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content, "name": message.name}
    if isinstance(message, AssistantTurn) and message.tool_calls:
        fields["tool_calls"] = [call.for_template(arguments_as_text) for call in message.tool_calls]
    if isinstance(message, ToolTurn):
        fields["tool_call_id"] = message.tool_call_id
    return {name: value for name, value in fields.items() if value is not None}


_MESSAGE_CHARACTERS = 100  # whose tokenizing takes as long as a message's way through the template


def size_for_template(messages: Sequence[ChatMessage | AssistantTurn | ToolTurn]) -> int:
    """How much work a prompt of these is, in characters to be tokenized."""
    contents = (message.content or "" for message in messages)
    texts = (content if isinstance(content, str) else "".join(part.text for part in content) for content in contents)
    return _MESSAGE_CHARACTERS * len(messages) + sum(map(len, texts))


class ToolFunction(StrictModel):
    unsupported = {"strict": (False,)}

    name: NonEmpty
    description: Text | None = None
    parameters: dict[str, Any] | None = documented(description="a JSON schema")


class Tool(StrictModel):
    type: Literal["function"]
    function: ToolFunction
