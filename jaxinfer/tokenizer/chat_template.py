"""Chat templates: Jinja programs of a model that turn a conversation into a prompt. Untrusted, so run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxinfer.request import RequestError
from jaxinfer.tokenizer.untrusted_text import Marks, joined

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
# Names of one field: templates read the first, GPT-OSS's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Ends the text to be continued. A template that strips that text leaves the mark without its space.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """Compiled on first use, so that a model with a broken template starts.

    `source`: None if the model has none; of several named ones, 'tool_use' is for chats with tools and 'default' for
    others. `special_tokens` (bos_token, eos_token, ...) are variables of the template. The environment and the
    preparation of messages are those of transformers' `apply_chat_template`, which templates are written for.
    """

    def __init__(self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(special_tokens)
        self._compiled = cache(self._compile)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        marks: Marks | None = None,
    ) -> str:
        """The prompt text. `tools`: JSON schemas as in OpenAI's API. `variables`: the template's own (enable_thinking,
        ...). With `continue_final_message` the prompt ends with the last message's text. `marks` are put into all
        untrusted text, and remain in the prompt.

        Raises `RequestError` for a model without a template, and for what the template refuses.
        """
        if not messages:
            raise RequestError("messages is empty: give at least one message", "messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other: give one of them", "messages")
        if reserved := [name for name in _GIVEN if name in (variables or {})]:
            raise RequestError(f"{reserved[0]} can't be a variable of the template: it is given by that name", "chat_template_kwargs")
        source = self._source_for(tools)
        try:
            chat = [_with_reasoning(_plain({k: v for k, v in message.items() if v is not None})) for message in messages]
            given = {"tools": _plain(tools), "documents": _plain(documents), **_plain(variables or {})}
            if marks is not None:
                chat, given = marks.mark_messages(chat), {name: marks.mark(value) for name, value in given.items()}
            given = self._special_tokens | given
            final = _mark_final(chat, source) if continue_final_message else ""
            text = self._compiled(source)(messages=chat, add_generation_prompt=add_generation_prompt, **given)
        except RequestError:
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
            # A template refuses (roles out of order, say) with TemplateError; malformed messages raise the others.
            raise RequestError(f"the model's chat template does not take these messages: {error}", "messages") from error
        return _cut_at_mark(text, final) if continue_final_message else text

    @property
    def text(self) -> str:
        """The templates as they are written; empty if there is none."""
        return "\n".join(self._sources.values())

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template may depend on `tools`; also if there is no template, or a broken one."""
        return "tool_use" in self._sources or self.reads("tools")

    def reads(self, variable: str) -> bool:
        """Whether the template may depend on the variable; also if there is no template, or a broken one."""
        return self._variables is None or variable in self._variables

    def mentions(self, name: str, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the name occurs in the template for these tools; also if there is none."""
        return not self._sources or name in self._source_for(tools)

    @cached_property
    def literals(self) -> str:
        """All literal text in the template; empty if there is no template, or a broken one."""
        try:
            trees = [_environment().parse(source) for source in self._sources.values()]
        except TemplateError:
            return ""
        written = [data.data for tree in trees for data in tree.find_all(nodes.TemplateData)]
        constants = [str(constant.value) for tree in trees for constant in tree.find_all(nodes.Const)]
        return "\n".join([*written, *constants, *self._special_tokens.values()])

    @cached_property
    def _variables(self) -> set[str] | None:
        try:
            return meta.find_undeclared_variables(_environment().parse(self._source_for(None)))
        except (TemplateError, RequestError):
            return None

    def _source_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if not self._sources:
            raise RequestError("this model has no chat template: send a prompt to /v1/completions (or LLM.generate) instead", "messages")
        if tools is not None and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" not in self._sources:
            raise RequestError(f"this model's chat templates are {', '.join(self._sources)}: none is the default", "messages")
        return self._sources["default"]

    def _compile(self, source: str) -> Callable[..., str]:
        return _environment().from_string(source).render


def _plain(value: Any) -> Any:
    """A copy made of JSON types only: a template is untrusted, and other objects have methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    if isinstance(value, str):  # a member of an enumeration, say
        return str.__str__(value)
    for number in (int, float):
        if isinstance(value, number):
            return number(value)
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_final(chat: list[dict[str, Any]], source: str) -> str:
    """Put the mark after the last message's text; returns that text."""
    content = chat[-1].get("content")
    if content is None or "content" not in source:
        raise RequestError("continue_final_message is set, but the last message has no content, or the template reads none", "messages")
    if isinstance(content, str):
        chat[-1]["content"] = content + _MARK
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    part = next((part for part in reversed(parts) if isinstance(part, dict) and isinstance(part.get("text"), str)), None)
    if part is None:
        raise RequestError("continue_final_message is set, but there is no text in the last message", "messages")
    text: str = part["text"]
    part["text"] = text + _MARK
    return text


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError("continue_final_message is set, but the model's chat template leaves the last message out", "messages")
    return text[:at] if text[at : at + len(_MARK)] == _MARK else text[:at].rstrip()


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b` by the environment's `concat`."""
        self.write("environment.concat([")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("])")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    concat = staticmethod(joined)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now, "dict": _Dict(), "namespace": _Namespace}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and &, which belong in a prompt as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().replace(tzinfo=None).strftime(format)  # local time that does not tell its zone


class _Dict:
    """Jinja's `dict` is Python's own, with its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Rejects names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a variable's name
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't keep {name!r}: no name may begin with an underscore")


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}, which marks assistant text for training: renders its body in a scope of
    its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
