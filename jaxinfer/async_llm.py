"""AsyncLLM: `LLM` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, overload

import numpy as np
from jaxtyping import Float, Float32

from jaxinfer.async_requests import AsyncRequests
from jaxinfer.config import EngineConfig
from jaxinfer.embedder import read_texts
from jaxinfer.encode.text_batching import Text, cut
from jaxinfer.engine_thread import NewRequest
from jaxinfer.generation import Generation
from jaxinfer.listeners import Failed
from jaxinfer.llm import LLM
from jaxinfer.prompts import Message, PromptInput
from jaxinfer.request import OutputDelta, RequestOutput, SamplingParams


class AsyncLLM:
    """`AsyncLLM(model=..., ...)` takes the arguments of `LLM`, or an `LLM` whose engine it shares with threads.

    The constructor blocks until the engine is ready: call it before the event loop runs, or with
    `await asyncio.to_thread(AsyncLLM, ...)`. Any task of any event loop may call methods; they raise what `LLM`'s
    raise. Cancelling a task aborts its requests. `async with` closes the engine on exit, except that of a given LLM.
    """

    def __init__(self, model: str | LLM = "default", *, config: EngineConfig | None = None, **settings: Any) -> None:
        self._is_owner = not isinstance(model, LLM)
        self.llm = model if isinstance(model, LLM) else LLM(model, config=config, **settings)
        self.engine = self.llm.engine
        self.tokenizer = self.llm.tokenizer
        self._requests: AsyncRequests | None = None

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `LLM.close`."""
        if self._is_owner:
            await asyncio.to_thread(self.llm.close)

    async def update_params(self, params: Mapping[str, Any]) -> int:
        """See `Engine.update_params`."""
        return await asyncio.to_thread(self.llm.update_params, params)

    async def update_weights(self, model: str) -> int:
        """See `Engine.update_weights`."""
        return await asyncio.to_thread(self.llm.update_weights, model)

    async def sleep(self, level: int = 1) -> None:
        """See `Engine.sleep`."""
        await asyncio.to_thread(self.llm.sleep, level)

    async def wake(self) -> None:
        """End `sleep`."""
        await asyncio.to_thread(self.llm.wake)

    async def generate(
        self, prompts: PromptInput | Iterable[PromptInput], params: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt. See `LLM.generate`."""
        return await self._complete(await asyncio.to_thread(self.llm.reader.read, prompts, params))

    @overload
    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> RequestOutput: ...

    @overload
    async def chat(
        self, messages: Sequence[Sequence[Message]], params: SamplingParams | None = None, **template: Any
    ) -> list[RequestOutput]: ...

    async def chat(self, messages: Any, params: SamplingParams | None = None, **template: Any) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several. See `LLM.chat`."""
        generation, is_one = await asyncio.to_thread(self.llm.reader.read_chat, messages, params, template)
        outputs = await self._complete(generation)
        return outputs[0] if is_one else outputs

    async def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> AsyncGenerator[OutputDelta]:
        """Continue one prompt; yields deltas as they come. Closing the iterator early aborts the request, at once with
        `async with contextlib.aclosing(...)`, after a `break` when Python collects it. See `LLM.stream`."""
        request = await asyncio.to_thread(self.llm.reader.read_one, prompt, params)
        async with aclosing(self._stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> AsyncGenerator[OutputDelta]:
        """Answer a conversation; yields deltas as `stream` does."""
        request = await asyncio.to_thread(self.llm.reader.read_conversation, messages, params, template)
        async with aclosing(self._stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def embed(
        self, texts: Text | Iterable[Text], *, dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> Float32[np.ndarray, "N D"]:
        """An embedding a row, in the order of texts. See `LLM.embed`."""
        reader = self.llm.text_reader()
        token_lists = await asyncio.to_thread(read_texts, reader, texts, dimensions, truncate_prompt_tokens)
        if not token_lists:
            return np.empty((0, dimensions or reader.embedding_size), np.float32)
        embedded = await self._of_this_loop().embed(self.llm.engine_loop.new_id(), token_lists)
        return cut(embedded.embeddings, dimensions)

    async def logits(self, token_ids: Sequence[int]) -> Float[np.ndarray, "T V"]:
        """See `LLM.logits`."""
        return await asyncio.to_thread(self.llm.logits, token_ids)

    async def logprobs(self, token_ids: Sequence[int]) -> Float[np.ndarray, " T"]:
        """See `LLM.logprobs`."""
        return await asyncio.to_thread(self.llm.logprobs, token_ids)

    def _stream(self, request: NewRequest) -> AsyncGenerator[OutputDelta]:
        return self._of_this_loop().stream(request)

    def _of_this_loop(self) -> AsyncRequests:
        requests = self._requests
        if requests is None or requests.event_loop is not asyncio.get_running_loop():
            requests = self._requests = AsyncRequests(self.llm.engine_loop)  # another event loop keeps its own
        return requests

    async def _complete(self, generation: Generation) -> list[RequestOutput]:
        """Wait for all outputs, with one wake-up of the event loop."""
        if not generation.requests:
            return []
        event_loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = event_loop.create_future()
        num_left = len(generation.requests)

        def end(ended: RequestOutput | Failed) -> None:  # in the engine's thread
            nonlocal num_left
            num_left -= 1
            if isinstance(ended, Failed) or not num_left:
                with suppress(RuntimeError):  # the event loop is closed, so nobody waits
                    event_loop.call_soon_threadsafe(_resolve, done, ended)

        generation.on_end = end
        try:
            self.llm.engine_loop.submit(generation.requests, generation)
            await done
        except BaseException:
            self.llm.engine_loop.abort(generation.request_ids)
            raise
        return generation.outputs


def _resolve(done: asyncio.Future[None], ended: RequestOutput | Failed) -> None:
    if done.done():  # cancelled, or another request has failed already
        return
    if isinstance(ended, Failed):
        done.set_exception(ended.error)
    else:
        done.set_result(None)
