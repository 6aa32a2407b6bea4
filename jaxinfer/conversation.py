"""Conversations as prompts, such that no message is lost: no call of a tool, no role that the model's template lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.prompts import Message
from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.untrusted_text import PromptText

_SURE_ROLES = ("system", "user", "assistant")  # that every template reads, or refuses itself
_FIRST_MARK, _NUM_MARKS = 0x100000, 0xFFFE  # private-use characters


def render_conversation(tokenizer: Tokenizer, messages: Sequence[Message], **template: Any) -> PromptText:
    """The prompt, as `Tokenizer.render_chat` has it with what it takes further.

    Arguments of calls may be JSON text, which the template reads as objects where it can. A template that has no calls of
    tools is given them, and what the tools returned, as text. Raises `RequestError` as `render_chat` does, and for a
    message that the template leaves out.
    """
    has_calls = any(_calls(message) or message.get("role") == "tool" for message in messages)
    if not has_calls and all(message.get("role") in _SURE_ROLES for message in messages):
        return tokenizer.render_chat(messages, **template)
    ways: list[Sequence[Message]] = [[*map(_with_objects, messages)], messages] if has_calls else [messages]
    if has_calls and not tokenizer.template_mentions("tool_calls", template.get("tools")):
        ways.append(_as_text(messages))
    first: RequestError | None = None
    for way in ways:
        try:
            prompt = tokenizer.render_chat(way, **template)
            left_out = _left_out(tokenizer, way, template)
        except RequestError as error:
            first = first or _naming_roles(error, messages)
            continue
        if left_out is None:
            return prompt
        first = first or _of_left_out(left_out, way[left_out])
    assert first is not None
    raise first


def _calls(message: Message) -> list[Mapping[str, Any]]:
    """A message's calls of functions, where they are such."""
    calls = message.get("tool_calls")
    are_calls = isinstance(calls, (list, tuple)) and all(isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls)
    return list(calls) if are_calls and calls else []


def _with_objects(message: Message) -> Message:
    """With the arguments of its calls as objects: most templates write them as JSON themselves."""
    calls = _calls(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]} if calls else message


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(arguments or "{}")}}
    except (ValueError, RecursionError):
        return call


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls as JSON in the assistant's words, what tools returned as the user's. Several results, and what the user said
    then, are one message: some templates want roles to alternate."""
    names: dict[Any, Any] = {}
    made: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if calls := _calls(message):
            functions = [call["function"] for call in map(_with_object, calls)]
            names |= {call.get("id"): function.get("name") for call, function in zip(calls, functions, strict=True)}
            lines = [json.dumps({key: function.get(key) for key in ("name", "arguments")}, ensure_ascii=False) for function in functions]
            made.append({"role": "assistant", "content": "\n".join([message["content"], *lines] if message.get("content") else lines)})
        elif is_result:
            name = names.get(message.get("tool_call_id")) or message.get("name") or message.get("tool_call_id")
            text = f"Result of {name}:\n{_text(message.get('content'))}"
            if after_result:
                made[-1]["content"] += f"\n\n{text}"
            else:
                made.append({"role": "user", "content": text})
        elif after_result and message.get("role") == "user" and isinstance(message.get("content"), str):
            made[-1]["content"] += f"\n\n{message['content']}"
        else:
            made.append(dict(message))
        after_result = is_result
    return list(made)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _left_out(tokenizer: Tokenizer, messages: Sequence[Message], template: Mapping[str, Any]) -> int | None:
    """The first message that the template leaves out, of those that some do. What it reads of each is marked to see it."""
    marked = list(messages)
    marks: dict[int, str] = {}
    for i, message in enumerate(messages):
        mark = chr(_FIRST_MARK + i % _NUM_MARKS)
        content = message.get("content")
        if calls := _calls(message):
            call, *others = calls
            function = {**call["function"], "name": f"{call['function'].get('name', '')}{mark}"}
            called = {**call, "id": f"{call.get('id', '')}{mark}", "function": function}  # Kimi's writes ids, the others names
            marked[i], marks[i] = {**message, "tool_calls": [called, *others]}, mark
        elif message.get("role") not in _SURE_ROLES and isinstance(content, str):
            marked[i], marks[i] = {**message, "content": content + mark}, mark
    if not marks:
        return None
    text = tokenizer.render_text(marked, **template)
    return next((i for i, mark in marks.items() if mark not in text), None)


def _of_left_out(index: int, message: Message) -> RequestError:
    role = message.get("role")
    if message.get("tool_calls"):
        what = f"messages[{index}] has tool_calls"
        return RequestError(f"{what}, which the model's chat template leaves out: send them as text", f"messages[{index}].tool_calls")
    what = f"messages[{index}] has the role {str(role)[:80]!r}"
    return RequestError(f"{what}, which the model's chat template leaves out: send another role", f"messages[{index}].role")


def _naming_roles(error: RequestError, messages: Sequence[Message]) -> RequestError:
    """A template's refusal, with the role that it is likely about."""
    odd = next((i for i, message in enumerate(messages) if message.get("role") not in _SURE_ROLES), None)
    if odd is None or error.param != "messages":
        return error
    role = str(messages[odd].get("role"))[:80]
    return RequestError(f"{error} (messages[{odd}] has the role {role!r})", f"messages[{odd}].role", error.code)
