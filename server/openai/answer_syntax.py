"""AnswerSyntax: what a server reads in its model's answers, and the parser of one answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxinfer.request import SamplingParams
from jaxinfer.tokenizer import Tokenizer
from server.config import ServerConfig
from server.openai.messages import for_template
from server.openai.protocol import ChatRequest
from server.tools.answer import AnswerParser
from server.tools.calls import CallRules, random_id
from server.tools.formats import format_of
from server.tools.layout import ToolFormat
from server.tools.parser import ToolCallParser
from server.tools.reasoning import ReasoningFormat, ReasoningSplitter, reasoning_format_of
from server.tools.response_template import calls_of, reasoning_of


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How a model writes thoughts and tool calls. None: they stay text."""

    calls: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> AnswerSyntax:
        """The model's, from its response template or its chat template, or as the server was told."""
        template, own = tokenizer.template_text, tokenizer.response_template
        calls = format_of(template, config.tool_format)
        reasoning = reasoning_format_of(template, config.reasoning_format)
        if config.tool_format == "auto":
            calls = calls_of(own, tokenizer.special_tokens, calls) or calls
        if config.reasoning_format == "auto":
            reasoning = reasoning_of(own) or reasoning
        return cls(calls, reasoning)

    def for_request(self, body: ChatRequest) -> AnswerSyntax:
        """What is read of this request's answers."""
        return self if body.tools else replace(self, calls=None)

    def with_markers(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters, with special tokens that are markers kept in the text."""
        texts = frozenset() if self.calls is None else self.calls.texts
        if self.reasoning is not None:
            texts |= {self.reasoning.begin, self.reasoning.end}
        ids = sorted(token_id for text, token_id in tokenizer.special_tokens.items() if text in texts)
        return replace(params, kept_special_tokens=tuple(ids)) if ids else params

    def new_parser(self, body: ChatRequest, prompt: str) -> AnswerParser | None:
        """A parser of one answer to this prompt; None where there is nothing to read in it."""
        splitter = calls = None
        if self.reasoning is not None:
            splitter = ReasoningSplitter(self.reasoning, is_open=begins_in_thoughts(self.reasoning, body, prompt))
        if self.calls is not None and body.tools:
            rules = CallRules({tool.function.name: tool.function.parameters or {} for tool in body.tools}, random_id)
            calls = ToolCallParser(self.calls, rules, max_calls=1 if body.parallel_tool_calls is False else None)
        return None if splitter is None and calls is None else AnswerParser(splitter, calls)


def begins_in_thoughts(markers: ReasoningFormat, body: ChatRequest, prompt: str) -> bool:
    """Whether the prompt ends within thoughts."""
    if body.continue_final_message:
        continued = str(for_template(body.messages[-1]).get("content", ""))
        return continued.rfind(markers.begin) > continued.rfind(markers.end)
    return prompt.rstrip().endswith(markers.begin)
