"""Conversations as prompts from which nothing is missing: no tool call, and no message whose role the chat template
ignores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.prompts import Message
from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.untrusted_text import PromptText

_SURE_ROLES = ("system", "user", "assistant")  # every template reads these, or refuses them itself
_FIRST_MARK, _NUM_MARKS = 0x100000, 0xFFFE  # private-use characters


Calls = Sequence[tuple[str, Any]]  # names and arguments, which are an object but for malformed ones


def calls_as_json(calls: Calls) -> str:
    """A line of JSON for each call."""
    return "\n".join(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls)


def render_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], *, calls_as_text: Callable[[Calls], str] = calls_as_json, **template: Any
) -> PromptText:
    """The prompt of a conversation. `template`: further arguments of `Tokenizer.render_chat`. `calls_as_text` writes
    the calls of a message for a template that has no tools.

    Arguments of tool calls may be JSON text; templates get them as objects where possible. A template that doesn't
    support tool calls gets them, and their results, as text. One that refuses results that nobody asked for gets those
    as text. Raises `RequestError` as `render_chat` does, and for a message that the template leaves out.
    """
    has_calls = any(_calls(message) or message.get("role") == "tool" for message in messages)
    if not has_calls and all(message.get("role") in _SURE_ROLES for message in messages):
        return tokenizer.render_chat(messages, **template)
    ways: list[Sequence[Message]] = [[*map(_with_objects, messages)], messages] if has_calls else [messages]
    if has_calls and not tokenizer.template_mentions("tool_calls", template.get("tools")):
        ways.append(_as_text(messages, calls_as_text))
    elif has_calls and (told := _unasked_as_text(messages)) is not None:
        ways.append([*map(_with_objects, told)])
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
    """A message's function calls; empty if it has none, or they are malformed."""
    calls = message.get("tool_calls")
    are_calls = isinstance(calls, (list, tuple)) and all(isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls)
    return list(calls) if are_calls and calls else []


def _with_objects(message: Message) -> Message:
    """The message with its calls' arguments as objects: most templates write them as JSON themselves."""
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


def _as_text(messages: Sequence[Message], calls_as_text: Callable[[Calls], str]) -> list[Message]:
    """Tool calls as text in assistant messages, results as user messages. Consecutive results, and the user message
    after them, become one message: some templates require alternating roles."""
    names: dict[Any, Any] = {}
    made: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if calls := _calls(message):
            functions = [call["function"] for call in map(_with_object, calls)]
            names |= {call.get("id"): function.get("name") for call, function in zip(calls, functions, strict=True)}
            text = calls_as_text([(function.get("name"), function.get("arguments")) for function in functions])
            made.append({"role": "assistant", "content": f"{message['content']}\n{text}" if message.get("content") else text})
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


def _unasked_as_text(messages: Sequence[Message]) -> list[Message] | None:
    """Results of calls that no assistant message has, as text of the user's message before them; one after them joins
    it, since some templates require alternating roles. None where there is no such result."""
    asked: set[Any] = set()
    made: list[Message] = []
    is_joined = False
    for message in messages:
        asked.update(call.get("id") for call in _calls(message))
        is_unasked = message.get("role") == "tool" and message.get("tool_call_id") not in asked
        content = _text(message.get("content"))
        text = f"Result of {message.get('name') or message.get('tool_call_id')}:\n{content}" if is_unasked else content
        before = made[-1] if made and made[-1].get("role") == "user" else None
        if before is not None and (is_unasked or (is_joined and message.get("role") == "user")):
            made[-1] = {"role": "user", "content": f"{_text(before.get('content'))}\n\n{text}"}
        else:
            made.append({"role": "user", "content": text} if is_unasked else message)
        is_joined = is_unasked or (is_joined and message.get("role") == "user")
    return made if any(a is not b for a, b in zip(made, messages, strict=False)) or len(made) < len(messages) else None


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _left_out(tokenizer: Tokenizer, messages: Sequence[Message], template: Mapping[str, Any]) -> int | None:
    """Index of the first message that the template leaves out, among those at risk. Each gets a marker character that
    must show up in the rendered text."""
    marked = list(messages)
    marks: dict[int, str] = {}
    for i, message in enumerate(messages):
        mark = chr(_FIRST_MARK + i % _NUM_MARKS)
        content = message.get("content")
        if calls := _calls(message):
            call, *others = calls
            function = {**call["function"], "name": f"{call['function'].get('name', '')}{mark}"}
            # Kimi's template writes ids, others write names; Mistral's takes ids of one length only.
            called = {**call, "id": f"{str(call.get('id', ''))[:-1]}{mark}", "function": function}
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
    """A template's error, with the role that likely caused it."""
    odd = next((i for i, message in enumerate(messages) if message.get("role") not in _SURE_ROLES), None)
    if odd is None or error.param != "messages":
        return error
    role = str(messages[odd].get("role"))[:80]
    return RequestError(f"{error} (messages[{odd}] has the role {role!r})", f"messages[{odd}].role", error.code)
