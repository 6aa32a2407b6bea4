"""A chat's messages and the tools it may call, in OpenAI's format and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from jaxinfer.request import RequestError
from server.openai.errors import ApiError, quoted
from server.openai.json_text import check_structure
from server.openai.strict import NonEmpty, StrictModel, UnicodeText, describe, one_of


class TextPart(StrictModel):
    place = "messages[].content[]"

    type: Literal["text"]
    text: UnicodeText

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind == "refusal" and isinstance(data, dict):  # an assistant's words as well
            return {"type": "text", "text": data.get("refusal")}
        if isinstance(kind, str) and kind != "text":
            raise RequestError(
                f"a content part's type is {kind[:40]!r}, which is not implemented: this model reads text only",
                "type",
                "unsupported_content",
            )
        return data


Content = Annotated[
    Annotated[UnicodeText, Tag("<string>")] | Annotated[list[TextPart], Field(min_length=1), Tag("<parts>")],
    one_of("a string or a list of text parts", str="<string>", list="<parts>", list_dict="<parts>"),
]


def _kind_of_message(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if role in ("assistant", "tool") else "<said>"


_NOT_READ: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}
_NOT_READ_IF_STRICT: dict[str, tuple[Any, ...]] = {"tool_call_id": (), "refusal": (), "annotations": ([],)}


class ChatMessage(StrictModel):
    """A message to the model: from 'system', 'developer', 'user', or any other role that its chat template knows."""

    place = "messages[]"
    unsupported = _NOT_READ
    unsupported_if_strict = _NOT_READ_IF_STRICT

    role: NonEmpty
    content: Content
    name: UnicodeText | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_functions(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "function":
            message = "role is 'function', which is not implemented: send what a tool returned with role 'tool'"
            raise RequestError(message, "role", "unsupported_parameter")
        return data


class FunctionCall(StrictModel):
    place = "messages[].tool_calls[].function"

    name: NonEmpty
    arguments: UnicodeText = Field(description="a JSON object, as text")

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if not isinstance(self.as_object(), dict):
            raise RequestError(f"arguments is {quoted(self.arguments)}: it must be a JSON object, as text", "arguments")
        return self

    def as_object(self) -> Any:
        """None where they are not JSON, or exceed the limits of a body."""
        try:
            check_structure(self.arguments.encode(), "arguments")
            return json.loads(self.arguments or "{}")
        except (ValueError, ApiError):
            return None


class ToolCall(StrictModel):
    place = "messages[].tool_calls[]"

    id: NonEmpty
    type: Literal["function"] | None = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": self.function.arguments}}


class AssistantTurn(StrictModel):
    """The model's answer, or the tools that it called."""

    place = "messages[]"
    unsupported = {name: harmless for name, harmless in _NOT_READ.items() if name != "tool_calls"}
    unsupported_if_strict = _NOT_READ_IF_STRICT

    role: Literal["assistant"]
    content: Content | None = None
    name: UnicodeText | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Any = describe(description="what it thought, as text; for templates that read it, without effect on others")
    reasoning: Any = describe(description="another name of reasoning_content")

    @model_validator(mode="before")
    @classmethod
    def _read_refusal(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("content") is None and isinstance(data.get("refusal"), str):
            return data | {"content": data["refusal"]}  # the text of the refusal instead
        return data

    @model_validator(mode="after")
    def _check_said_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            if not self.thoughts:
                raise RequestError("content is null: it must be a string or a list of text parts where there are no tool_calls", "content")
            self.content = ""  # it was cut off while reasoning
        return self

    @property
    def thoughts(self) -> str | None:
        """None where there is no reasoning, or in a form that no template reads."""
        return next((text for text in (self.reasoning_content, self.reasoning) if isinstance(text, str)), None)


class ToolTurn(StrictModel):
    """What a tool returned."""

    place = "messages[]"

    role: Literal["tool"]
    content: Content
    tool_call_id: NonEmpty
    name: UnicodeText | None = None


AnyMessage = Annotated[
    Annotated[ChatMessage, Tag("<said>")] | Annotated[AssistantTurn, Tag("<assistant>")] | Annotated[ToolTurn, Tag("<tool>")],
    Discriminator(_kind_of_message),
]


def for_template(message: ChatMessage | AssistantTurn | ToolTurn) -> dict[str, Any]:
    """A message as chat templates read it: text content, 'developer' under its older name."""
    content = message.content if isinstance(message.content, str | None) else "".join(part.text for part in message.content)
    fields: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content, "name": message.name}
    if isinstance(message, AssistantTurn) and message.tool_calls:
        fields["tool_calls"] = [call.for_template() for call in message.tool_calls]
    if isinstance(message, AssistantTurn):
        fields["reasoning_content"] = message.thoughts
    if isinstance(message, ToolTurn):
        fields["tool_call_id"] = message.tool_call_id
    return {name: value for name, value in fields.items() if value is not None}


_MESSAGE_CHARACTERS = 100  # whose tokenizing takes as long as rendering a message


def size_for_template(messages: Sequence[ChatMessage | AssistantTurn | ToolTurn]) -> int:
    """The work of rendering these messages, in characters to be tokenized."""
    contents = (message.content or "" for message in messages)
    texts = (content if isinstance(content, str) else "".join(part.text for part in content) for content in contents)
    return _MESSAGE_CHARACTERS * len(messages) + sum(map(len, texts))


class ToolFunction(StrictModel):
    place = "tools[].function"

    name: NonEmpty
    description: UnicodeText | None = None
    strict: bool | None = describe(description="whether arguments must keep to the schema; true is not implemented")
    parameters: dict[str, Any] | None = describe(description="a JSON schema")


class Tool(StrictModel):
    place = "tools[]"

    type: Literal["function"] | None = "function"
    function: ToolFunction
    strict: bool | None = describe(description="another place of function.strict")

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}
