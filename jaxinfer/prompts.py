"""Prompts, texts and conversations: converts every form that callers may use. Imports no JAX."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from jaxinfer.request import RequestError, SamplingParams

PromptInput = str | Sequence[int]  # text or token ids
Message = Mapping[str, Any]

_FORMS = "one is a text or a list of token ids, several are a list of such"


def as_prompts(given: PromptInput | Iterable[PromptInput], name: str) -> list[str | list[int]]:
    """A list of texts and token id lists, from a single one or any iterable (lists, arrays, generators). Raises
    `RequestError` naming the argument for anything else."""
    given = _plain(given)
    if isinstance(given, str):
        return [given]
    items = _items(given, name)
    if _are_plain_tokens(items):
        return [items]
    num_tokens = sum(map(_is_token, items))
    if not num_tokens:
        return [_prompt(item, f"{name}[{number}]", name) for number, item in enumerate(items)]
    if num_tokens < len(items):
        odd = next(item for item in items if not _is_token(item))
        raise RequestError(f"{name} has token ids beside {reprlib.repr(odd)}: {_FORMS}", name)
    return [list(map(int, items))]


def as_params(given: SamplingParams | Iterable[SamplingParams], count: int) -> list[SamplingParams]:
    """One for each prompt. Raises `RequestError` for another number, or for other types."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise RequestError(f"params is {reprlib.repr(given)}: give SamplingParams(...), or one for each prompt", "params")
    several = list(given)
    for number, params in enumerate(several):
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params[{number}] is {reprlib.repr(params)}: it must be SamplingParams(...)", "params")
    if len(several) != count:
        raise RequestError(f"{len(several)} sampling parameters for {count} prompts: give one, or one for each", "params")
    return several


def as_conversations(given: Iterable[Message] | Iterable[Iterable[Message]]) -> tuple[list[list[Message]], bool]:
    """Conversations, and whether a single one was given. Raises `RequestError` for anything else."""
    items = _items(given, "messages", "a list of messages such as {'role': 'user', 'content': 'hi'}, or a list of such lists")
    if not items:
        raise RequestError("messages is empty: give at least one message", "messages")
    is_one = isinstance(items[0], Mapping)
    conversations = [items] if is_one else [_items(item, f"messages[{i}]", "a list of messages") for i, item in enumerate(items)]
    for messages in conversations:
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError(f"messages has {reprlib.repr(message)}: a message is a dict with 'role' and 'content'", "messages")
    return conversations, is_one


def _prompt(item: Any, name: str, param: str) -> str | list[int]:
    item = _plain(item)
    if isinstance(item, str):
        return item
    tokens = _items(item, name, "a text or a list of token ids", param)
    if _are_plain_tokens(tokens):
        return tokens
    for token in tokens:
        if not _is_token(token):
            raise RequestError(f"{name} has token id {reprlib.repr(token)}: {_FORMS}", param)
    return list(map(int, tokens))


def _items(given: Any, name: str, form: str = _FORMS, param: str | None = None) -> list[Any]:
    if isinstance(given, (str, bytes, bytearray, Mapping)) or not isinstance(given, Iterable):
        hint = " (conversations go to `chat`)" if isinstance(given, Mapping) and "messages" not in name else ""
        raise RequestError(f"{name} is {reprlib.repr(given)}{hint}: {form}", param or name)
    return list(given)


def _plain(given: Any) -> Any:
    """Arrays as lists; other values unchanged."""
    return given.tolist() if hasattr(given, "tolist") else given


def _are_plain_tokens(items: list[Any]) -> bool:
    """Whether these are Python integers, which they mostly are: a look at their types alone."""
    return set(map(type, items)) == {int}


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
