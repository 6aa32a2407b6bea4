"""/v1/chat/completions: messages in, the assistant's answer out, at once or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxinfer.conversation import render_conversation
from jaxinfer.request import OutputDelta, RequestContext, RequestOutput, SamplingParams, TokenLogprob
from jaxinfer.segments import Prompt
from jaxinfer.tokenizer import Tokenizer
from server.openai.answer_grammar import with_answer_grammar
from server.openai.answer_syntax import begins_in_thoughts
from server.openai.answers import AnswerReader, chat_finished_by, whole_message
from server.openai.caller import UNKNOWN, Caller, request_identity, tier_of
from server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs_by_id
from server.openai.messages import for_template, size_for_template
from server.openai.protocol import ChatRequest
from server.openai.responses import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, Usage
from server.openai.service import Service, new_id
from server.openai.template_variables import template_variables
from server.openai.text_work import size_of_grammar, work_on
from server.tools.answer import AnswerParser
from server.tools.formats import GENERIC
from server.tools.prompting import with_call_ids, with_tools, written_calls
from server.usage import RequestUsage

ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class _ChatJob:
    id: str
    created: int
    prompt: Prompt
    params: SamplingParams
    context: RequestContext
    usage: RequestUsage
    body: ChatRequest  # the answer's options
    new_parser: Callable[[], AnswerParser | None]

    @property
    def echoed(self) -> str:
        """The last message's text, which the answer begins with, if the assistant said it or the answer continues
        it."""
        last = self.body.messages[-1]
        if not self.body.echo or not (last.role == "assistant" or self.body.continue_final_message):
            return ""
        return str(for_template(last).get("content", ""))

    def logprobs(self, tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        return chat_logprobs(TokenNames(tokenizer, bool(self.body.return_tokens_as_token_ids)), entries, self.params.logprobs or 0)


async def _prepare(service: Service, body: ChatRequest, caller: Caller) -> _ChatJob:
    context = caller.context(body)
    params = body.sampling_params(service.backend.sampling_defaults)
    syntax = service.syntax.for_request(body)
    params = syntax.with_markers(params, service.tokenizer)
    text = await work_on(size_for_template(body.messages), partial(_render, service, body))
    is_thinking = syntax.reasoning is not None and begins_in_thoughts(syntax.reasoning, body, text)
    params = with_answer_grammar(params, syntax, body, service.tokenizer.special_tokens, is_thinking=is_thinking)
    # Without special tokens: the template has written them.
    token_ids = await work_on(len(text), partial(service.encode, "messages", text, params, add_special_tokens=False))
    prompt = await work_on(size_of_grammar(params), partial(service.validate, "messages", token_ids, params))
    id = new_id("chatcmpl")
    usage = service.usage.measure(request_identity(caller, context, id, ENDPOINT, body.model), [prompt], params.n)
    return _ChatJob(id, int(time.time()), prompt, params, context, usage, body, partial(syntax.new_parser, body, text))


def _render(service: Service, body: ChatRequest) -> str:
    tokenizer = service.tokenizer
    tools = [tool.for_template() for tool in body.tools] if body.tools else None
    messages: list[Mapping[str, Any]] = [for_template(message) for message in body.messages]
    if service.syntax.calls is not None:
        messages = with_call_ids(messages, service.syntax.calls)
    if tools is not None and not tokenizer.reads_tools:
        messages, tools = with_tools(messages, tools, service.syntax.calls or GENERIC), None
    return render_conversation(
        tokenizer,
        messages,
        calls_as_text=partial(written_calls, service.syntax.calls or GENERIC),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        tools=tools,
        chat_template_kwargs=template_variables(tokenizer, body),
    )


async def respond(service: Service, body: ChatRequest, caller: Caller = UNKNOWN) -> ChatCompletion:
    """The whole answer. Raises what `errors.from_exception` knows."""
    service = service.of_model(body.model)
    chat = await _prepare(service, body, caller)
    output = RequestOutput.empty(chat.id, None, chat.prompt.token_ids.tolist(), chat.params)
    readers = [AnswerReader(chat.new_parser()) for _ in output.outputs]
    texts: list[list[ChatDelta]] = [[ChatDelta(content=chat.echoed)] for _ in readers]
    with chat.usage:
        async with aclosing(service.backend.generate(chat.id, chat.prompt, chat.params, chat.context)) as deltas:
            async for delta in deltas:
                chat.usage.add(delta)
                output.add(delta)
                texts[delta.index] += readers[delta.index].read(delta.text, is_last=delta.finish_reason is not None)
        reasons = [chat_finished_by(sequence.finish_reason, readers[sequence.index]) for sequence in output.outputs]
    choices = []
    for sequence, reason in zip(output.outputs, reasons, strict=True):
        assert reason is not None
        logprobs = None if sequence.logprobs is None else chat.logprobs(service.tokenizer, sequence.logprobs)
        message = whole_message(texts[sequence.index])
        token_ids = sequence.token_ids if body.return_token_ids else None
        choices.append(ChatChoice(index=sequence.index, message=message, logprobs=logprobs, finish_reason=reason, token_ids=token_ids))
    prompt_logprobs = None
    if output.prompt_logprobs is not None:
        prompt_logprobs = prompt_logprobs_by_id(service.tokenizer, output.prompt_logprobs, chat.params.prompt_logprobs or 0)
    return ChatCompletion(
        prompt_token_ids=chat.prompt.token_ids.tolist() if body.return_token_ids else None,
        prompt_logprobs=prompt_logprobs,
        id=chat.id,
        created=chat.created,
        model=body.model,
        choices=choices,
        usage=Usage.of(chat.usage),
        service_tier=tier_of(chat.context),
    )


async def stream(service: Service, body: ChatRequest, caller: Caller = UNKNOWN) -> AsyncGenerator[ChatChunk]:
    """The answer in chunks: for each choice its role, then text, then its finish reason; last the usage where
    requested."""
    service = service.of_model(body.model)
    chat = await _prepare(service, body, caller)
    started: dict[int, AnswerReader] = {}
    tier = tier_of(chat.context)

    def chunk(choices: list[ChatChunkChoice], usage: Usage | None = None, num_unsent: int = 0) -> ChatChunk:
        """`num_unsent` tokens are counted already and come with a later chunk."""
        made = ChatChunk(
            id=chat.id, object="chat.completion.chunk", created=chat.created, model=body.model, choices=choices, service_tier=tier
        )
        if body.includes_usage:
            made.usage = Usage.of(chat.usage, num_unsent) if body.includes_usage_so_far else usage
        return made

    with chat.usage:
        async with aclosing(service.backend.generate(chat.id, chat.prompt, chat.params, chat.context)) as deltas:
            async for delta in deltas:
                chat.usage.add(delta)
                reader = started.get(delta.index) or AnswerReader(chat.new_parser())
                # First: it raises for an aborted request, before its role is sent.
                choices = _choices(service, chat, delta, reader)
                if delta.index not in started:
                    role = ChatDelta(role="assistant", content="")
                    choice = ChatChunkChoice(index=delta.index, delta=role, logprobs=None, finish_reason=None)
                    opening = chunk([choice], num_unsent=len(delta.token_ids))
                    if body.return_token_ids and not started:
                        opening.prompt_token_ids = chat.prompt.token_ids.tolist()
                    started[delta.index] = reader
                    yield opening
                    if chat.echoed:
                        content = ChatDelta(content=chat.echoed)
                        choice = ChatChunkChoice(index=delta.index, delta=content, logprobs=None, finish_reason=None)
                        yield chunk([choice], num_unsent=len(delta.token_ids))
                for choice in choices:
                    yield chunk([choice])
    if body.includes_usage:
        yield chunk([], Usage.of(chat.usage))


def _choices(service: Service, chat: _ChatJob, delta: OutputDelta, reader: AnswerReader) -> list[ChatChunkChoice]:
    """What a delta adds, if anything: text and log-probabilities, then, as in OpenAI's API, the end with an empty
    delta."""
    choices = []
    logprobs = chat.logprobs(service.tokenizer, delta.logprobs) if delta.logprobs else None
    wants_ids = bool(chat.body.return_token_ids)
    added = reader.read(delta.text, is_last=delta.finish_reason is not None)
    if not added and (logprobs or (wants_ids and delta.token_ids)):
        added = [ChatDelta(content="")]
    for number, content in enumerate(added):  # the tokens are of all of them, and come with the first
        choice = ChatChunkChoice(index=delta.index, delta=content, logprobs=None if number else logprobs, finish_reason=None)
        if wants_ids and not number:
            choice.token_ids = list(delta.token_ids)
        choices.append(choice)
    reason = chat_finished_by(delta.finish_reason, reader)
    if reason:
        choices.append(ChatChunkChoice(index=delta.index, delta=ChatDelta(), logprobs=None, finish_reason=reason))
    return choices
