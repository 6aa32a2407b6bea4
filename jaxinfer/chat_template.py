"""Chat templates: Jinja programs that come with a model and turn a conversation into its prompt. Run in a sandbox: they are untrusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.request import RequestError


class ChatTemplate:
    """Compiled on the first use, so that a model whose template is never used starts even if it is broken.

    `source` is None where the model has none. `special_tokens` (bos_token, eos_token, ...) are the template's variables.
    The environment is the one these templates are written for, that of transformers' `apply_chat_template`.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._render: Callable[..., str] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt text. Raises `RequestError` for a model without a template and for messages the template refuses."""
        if self._source is None:
            raise RequestError("this model has no chat template: send a prompt to /v1/completions (or LLM.generate) instead", "messages")
        try:
            if self._render is None:
                self._render = _environment().from_string(self._source).render
            variables = {"tools": None, "documents": None, **self._special_tokens}
            return self._render(messages=list(messages), add_generation_prompt=add_generation_prompt, **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # The template's own refusals (roles out of order, say) come as TemplateError; the others from odd messages.
            raise RequestError(f"the model's chat template does not take these messages: {error}", "messages") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and &, which belong in a prompt as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant said, for training: here its body as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
