"""Requests and outputs of `LLM` and `AsyncLLM`: prompts and parameters become requests, deltas become outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from jaxinfer.conversation import render_conversation
from jaxinfer.engine import Engine
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.engine_thread import NewRequest
from jaxinfer.listeners import Event, Failed
from jaxinfer.prompts import Message, PromptInput, as_conversations, as_params, as_prompts
from jaxinfer.request import OutputDelta, RequestError, RequestOutput, SamplingParams


class Generation:
    """The requests and outputs of one call. As a listener it adds deltas in the engine's thread, and calls `on_end`
    there with each finished output, or with `Failed` instead. So no thread wakes up for a delta."""

    def __init__(self, requests: list[NewRequest], outputs: list[RequestOutput]) -> None:
        self.requests = requests
        self.outputs = outputs
        self.on_end: Callable[[RequestOutput | Failed], None] = lambda end: None
        self._by_id = {output.request_id: output for output in outputs}

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    def deliver(self, events: list[Event]) -> None:
        """See `Listener`."""
        for event in events:
            if isinstance(event, OutputDelta):
                output = self._by_id[event.request_id]
                output.add(event)
                if event.finish_reason is not None and output.is_finished:
                    self.on_end(output)
            elif isinstance(event, Failed):
                self.on_end(event)


class RequestReader:
    """Makes requests from the arguments of calls. Any thread may call it."""

    def __init__(self, engine: Engine, engine_loop: EngineLoop) -> None:
        self._engine, self._engine_loop = engine, engine_loop

    def read(self, prompts: PromptInput | Iterable[PromptInput], params: SamplingParams | Iterable[SamplingParams] | None) -> Generation:
        """Requests in the order of prompts. Raises `RequestError` for the first that can't be served, and as
        `EngineLoop.check` does."""
        self._engine_loop.check()  # first: the tokenizer's threads don't survive a fork either
        several = as_prompts(prompts, "prompts")
        each, most = as_params(self.default_params() if params is None else params, len(several)), self._engine.max_model_len
        encode = partial(self._engine.tokenizer.encode_prompt, max_model_len=most, add_special_tokens=True)
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        pairs = zip(several, each, strict=True)
        return self._read(texts, [encode(p, of_p) if isinstance(p, str) else p for p, of_p in pairs], each)

    def default_params(self, **fields: Any) -> SamplingParams:
        """`SamplingParams` with these fields, over the model's defaults."""
        return SamplingParams(**{**fields, **self._engine.sampling_defaults})

    def read_one(self, prompt: PromptInput, params: SamplingParams | None) -> NewRequest:
        """The request of a single prompt. Raises as `read` does, and for several prompts."""
        requests = self.read(prompt, params).requests
        if len(requests) != 1:
            raise RequestError(f"there are {len(requests)} prompts: stream one at a time, in a thread or task of its own", "prompts")
        return requests[0]

    def read_chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None, template: dict[str, Any]
    ) -> tuple[Generation, bool]:
        """Requests of conversations, and whether a single one was given. Raises `RequestError` if there is no message,
        or if the template refuses one."""
        self._engine_loop.check()
        conversations, is_one = as_conversations(messages)
        tokenizer = self._engine.tokenizer
        texts = [render_conversation(tokenizer, conversation, **template) for conversation in conversations]
        # The template writes the special tokens itself.
        each, most = as_params(params or self.default_params(max_tokens=None), len(texts)), self._engine.max_model_len
        pairs = zip(texts, each, strict=True)
        token_lists = [tokenizer.encode_prompt(text, of_text, most, add_special_tokens=False) for text, of_text in pairs]
        return self._read(texts, token_lists, each), is_one

    def read_conversation(self, messages: Sequence[Message], params: SamplingParams | None, template: dict[str, Any]) -> NewRequest:
        """The request of a single conversation. Raises as `read_chat` does, and for several."""
        generation, is_one = self.read_chat(messages, params, template)
        if not is_one:
            raise RequestError(f"there are {len(generation.requests)} conversations: stream one at a time", "messages")
        return generation.requests[0]

    def _read(self, texts: Sequence[str | None], token_lists: list[list[int]], each: Sequence[SamplingParams]) -> Generation:
        requests, outputs = [], []
        for number, (text, token_ids, of_prompt) in enumerate(zip(texts, token_lists, each, strict=True)):
            try:
                prompt = self._engine.validate(token_ids, of_prompt)
            except RequestError as error:
                if len(token_lists) == 1:
                    raise
                raise RequestError(f"of {len(token_lists)} prompts number {number}: {error}", error.param, error.code) from None
            requests.append(NewRequest(self._engine_loop.new_id(), prompt, of_prompt))
            outputs.append(RequestOutput.empty(requests[-1].request_id, text, prompt.token_ids.tolist(), of_prompt))
        return Generation(requests, outputs)
