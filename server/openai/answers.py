"""A chat's answer as clients get it: thoughts, content and tool calls, whole or in deltas, from the model's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.request import FinishReason
from server.openai.responses import (
    AssistantMessage,
    ChatDelta,
    ChatFinishedBy,
    FunctionCallDelta,
    ToolCallDelta,
    WrittenFunction,
    WrittenToolCall,
)
from server.openai.service import finished_by
from server.tools.answer import AnswerParser
from server.tools.events import AnswerEvent, ArgumentText, CallOpened, ContentText, ReasoningText


@dataclass(slots=True)
class AnswerReader:
    """One choice's answer: text becomes deltas. Without a parser all of it is content."""

    parser: AnswerParser | None
    _num_calls: int = field(default=0, init=False)

    @property
    def has_calls(self) -> bool:
        return self.parser is not None and self.parser.has_calls

    def read(self, text: str, *, is_last: bool) -> list[ChatDelta]:
        """What this piece of text adds, if anything."""
        if self.parser is None:
            return [ChatDelta(content=text)] if text else []
        pieces = self.parser.feed(text) + (self.parser.finish() if is_last else [])
        return [self._delta(piece) for piece in pieces]

    def _delta(self, piece: AnswerEvent) -> ChatDelta:
        match piece:
            case ReasoningText(text):
                return ChatDelta(reasoning_content=text)
            case ContentText(text):
                return ChatDelta(content=text)
            case CallOpened(id, name):
                self._num_calls += 1
                function = FunctionCallDelta(name=name, arguments="")
                call = ToolCallDelta(index=self._num_calls - 1, id=id, type="function", function=function)
                return ChatDelta(tool_calls=[call])
            case ArgumentText(text):
                call = ToolCallDelta(index=self._num_calls - 1, function=FunctionCallDelta(arguments=text))
                return ChatDelta(tool_calls=[call])


def chat_finished_by(reason: FinishReason | None, reader: AnswerReader) -> ChatFinishedBy | None:
    """The finish reason in the API's terms. Raises as `finished_by`."""
    finished = finished_by(reason)
    return "tool_calls" if finished == "stop" and reader.has_calls else finished


def whole_message(deltas: Sequence[ChatDelta]) -> AssistantMessage:
    """The message that these deltas are of."""
    content = "".join(delta.content or "" for delta in deltas)
    thoughts = "".join(delta.reasoning_content or "" for delta in deltas)
    calls: list[tuple[ToolCallDelta, list[str]]] = []
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        if call.id is not None:
            calls.append((call, []))
        calls[-1][1].append(call.function.arguments)
    given: dict[str, Any] = {}
    if calls:
        given["tool_calls"] = [_whole_call(opening, "".join(arguments)) for opening, arguments in calls]
    return AssistantMessage(content=content if content or not calls else None, reasoning_content=thoughts or None, **given)


def _whole_call(opening: ToolCallDelta, arguments: str) -> WrittenToolCall:
    assert opening.id is not None and opening.function.name is not None
    return WrittenToolCall(id=opening.id, function=WrittenFunction(name=opening.function.name, arguments=arguments))
