"""The grammar that an answer is held to: tool calls that have to come, JSON after thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.request import RequestError, SamplingParams, StructuredOutputs
from server.openai.answer_syntax import AnswerSyntax
from server.openai.protocol import ChatRequest
from server.openai.structured import as_grammar
from server.openai.tool_choice import enforced_choice
from server.tools.grammar import call_grammar
from server.tools.reasoning import ReasoningFormat


def with_answer_grammar(
    params: SamplingParams, syntax: AnswerSyntax, body: ChatRequest, special_tokens: Mapping[str, int], *, is_thinking: bool
) -> SamplingParams:
    """The parameters with the grammar of `tool_choice`, strict tools and `response_format`, before which a model may
    think. `is_thinking`: the prompt ends within thoughts. Raises `RequestError` for what can't go together."""
    choice = enforced_choice(body.tools or (), body.tool_choice)
    wanted = params.structured_outputs
    if choice is None and (wanted is None or syntax.reasoning is None):
        return params
    if choice is not None and wanted is not None:
        raise RequestError("tools that have to be called and response_format don't go together: give one", "response_format")
    if choice is not None:
        if syntax.calls is None:
            message = "no tool calls are read here, so none can be asked for: start the server without --tool-format none"
            raise RequestError(message, "tool_choice")
        tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
        is_parallel = body.parallel_tool_calls is not False
        grammar = call_grammar(syntax.calls, tools, special_tokens, choice=choice, is_parallel=is_parallel)
    else:
        assert wanted is not None
        answer = as_grammar(wanted)
        if answer is None:  # a grammar that says all
            return params
        grammar = f"start: {answer}\n"
    if syntax.reasoning is not None:
        grammar = after_thoughts(grammar, syntax.reasoning, special_tokens, is_thinking=is_thinking)
    return replace(params, structured_outputs=StructuredOutputs(grammar=grammar))


def after_thoughts(grammar: str, markers: ReasoningFormat, special_tokens: Mapping[str, int], *, is_thinking: bool) -> str:
    """A grammar whose `start` may come after thoughts, and does where the answer begins within them."""
    begin, end = (special_tokens.get(text) for text in (markers.begin, markers.end))
    if end is None:
        rules = [f"thoughts[suffix={_quoted(markers.end)}]: /(?s:.*)/"]
    else:
        rules = ["THOUGHTS: /(?s:.*)/", f"thoughts: THOUGHTS <[{end}]>"]
    opening = _quoted(markers.begin) if begin is None else f"<[{begin}]>"
    before = "thoughts" if is_thinking else f"({opening} thoughts)?"
    renamed = grammar.replace("start:", "answer:", 1)
    return "\n".join([f"start: {before} BETWEEN? answer", "BETWEEN: /[ \\t\\r\\n]{1,8}/", *rules, renamed])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
