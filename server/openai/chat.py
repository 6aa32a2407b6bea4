"""/v1/chat/completions: messages in, the assistant's answer out, at once or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from jaxinfer.request import ANYONE, OutputDelta, RequestContext, RequestOutput, SamplingParams
from server.openai.logprobs import chat_logprobs
from server.openai.protocol import ChatRequest
from server.openai.responses import AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, Usage
from server.openai.service import Service, finished_by, new_id


@dataclass(frozen=True, slots=True)
class _Chat:
    id: str
    created: int
    prompt: list[int]
    params: SamplingParams


async def _prepare(service: Service, body: ChatRequest) -> _Chat:
    service.check_model(body.model)
    params = body.sampling_params()
    text = service.tokenizer.render_chat([message.for_template() for message in body.messages])
    prompt = await service.encode(text, add_special_tokens=False)  # the template has written them
    service.check_prompt("messages", prompt, params, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens")
    return _Chat(new_id("chatcmpl"), int(time.time()), prompt, params)


async def respond(service: Service, body: ChatRequest, context: RequestContext = ANYONE) -> ChatCompletion:
    """The whole answer. Raises what `errors.from_exception` knows."""
    chat = await _prepare(service, body)
    output = RequestOutput.empty(chat.id, None, chat.prompt, chat.params)
    async with aclosing(service.backend.generate(chat.id, chat.prompt, chat.params, context)) as deltas:
        async for delta in deltas:
            output.add(delta)
    choices = []
    for sequence in output.outputs:
        reason = finished_by(sequence.finish_reason)
        assert reason is not None
        logprobs = chat_logprobs(service.tokenizer, sequence.logprobs, chat.params.logprobs or 0) if sequence.logprobs is not None else None
        message = AssistantMessage(content=sequence.text)
        choices.append(ChatChoice(index=sequence.index, message=message, logprobs=logprobs, finish_reason=reason))
    num_output = sum(len(sequence.token_ids) for sequence in output.outputs)
    usage = Usage.of(len(chat.prompt), num_output, output.cached_tokens)
    return ChatCompletion(id=chat.id, created=chat.created, model=body.model, choices=choices, usage=usage)


async def stream(service: Service, body: ChatRequest, context: RequestContext = ANYONE) -> AsyncGenerator[ChatChunk]:
    """The answer in chunks: for each choice its role, then text, then why it ended; last the usage where asked for."""
    chat = await _prepare(service, body)
    started: set[int] = set()
    num_output = cached = 0

    def chunk(choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        made = ChatChunk(id=chat.id, object="chat.completion.chunk", created=chat.created, model=body.model, choices=choices)
        if body.includes_usage:
            made.usage = usage
        return made

    async with aclosing(service.backend.generate(chat.id, chat.prompt, chat.params, context)) as deltas:
        async for delta in deltas:
            num_output += len(delta.token_ids)
            cached = max(cached, delta.cached_tokens)
            if delta.index not in started:
                started.add(delta.index)
                role = ChatDelta(role="assistant", content="")
                yield chunk([ChatChunkChoice(index=delta.index, delta=role, logprobs=None, finish_reason=None)])
            for choice in _choices(service, chat, delta):
                yield chunk([choice])
    if body.includes_usage:
        yield chunk([], Usage.of(len(chat.prompt), num_output, cached))


def _choices(service: Service, chat: _Chat, delta: OutputDelta) -> list[ChatChunkChoice]:
    """What a delta adds, if anything: text and log-probabilities, then, as OpenAI has it, the end with an empty delta."""
    choices = []
    logprobs = chat_logprobs(service.tokenizer, delta.logprobs, chat.params.logprobs or 0) if delta.logprobs else None
    if delta.text or logprobs:
        content = ChatDelta(content=delta.text)
        choices.append(ChatChunkChoice(index=delta.index, delta=content, logprobs=logprobs, finish_reason=None))
    reason = finished_by(delta.finish_reason)
    if reason:
        choices.append(ChatChunkChoice(index=delta.index, delta=ChatDelta(), logprobs=None, finish_reason=reason))
    return choices
