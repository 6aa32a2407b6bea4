"""A backend without a model, and a real tokenizer with one token a byte: the HTTP front's tests need no weights and no JAX."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxinfer.encode.text_batching import Embedded, TextReader, TokenIds
from jaxinfer.engine.intake import RequestIntake
from jaxinfer.request import DEFAULT_CONTEXT, DeviceUsage, FinishReason, OutputDelta, RequestContext, SamplingParams, TokenLogprob
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.chat_template import ChatTemplate
from server.backend import Overloaded, Unavailable

ANSWER = "Hello, wörld! 🎉"
MAX_MODEL_LEN = 512
EMBEDDING_SIZE = 8
MAX_TOKENS = 300  # of a text to embed
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str = TEMPLATE, more: Sequence[str] = ()) -> Tokenizer:
    """Each of the 256 bytes is a token, and so are <|im_start|>, <|im_end|> and `more` special ones."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>", *more)])
    return Tokenizer(backend, None, (257,), ChatTemplate(template, {}))


class FakeBackend:
    """Answers every prompt with `answer`, a character a delta, then stops. `hold` makes requests wait after `hold_after` deltas;
    `error` is raised there instead, or the request is given up for the reason `gives_up`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.answer = ANSWER
        self.seconds_in_iteration = 0.0
        self.max_model_len = MAX_MODEL_LEN
        self.max_batch_size = 8
        self.sampling_defaults: dict[str, Any] = {}
        self.text_reader: TextReader | None = TextReader(tokenizer, tokenizer.vocab_size, MAX_TOKENS, EMBEDDING_SIZE)
        self.tokenizer = tokenizer
        self.seen: list[tuple[str, tuple[int, ...], SamplingParams]] = []
        self.contexts: list[RequestContext] = []
        self.embedded: list[list[list[int]]] = []
        self.aborted: list[str] = []
        self.num_open = 0
        self.is_full = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.hold_after = 0
        self.error: Exception | None = None
        self.gives_up: FinishReason | None = None
        self.failed: str | None = None
        self.started = self.stopped = False
        self._stats = EngineStats(prefill_devices=("cpu:0",), decode_devices=("cpu:1",), prefill_pages=64, decode_pages=128)

    def stats(self) -> EngineStats:
        return self._stats

    def cluster(self) -> None:
        return None

    def models(self) -> None:
        return None

    def is_ready(self) -> bool:
        return self.started and not self.stopped and self.failed is None

    def iteration_seconds(self):
        return self.seconds_in_iteration

    def failure(self) -> str | None:
        return self.failed

    async def start(self) -> None:
        self.started, self.stopped = True, False

    def abort_all(self) -> None:
        self.stopped = True

    async def stop(self) -> None:
        self.stopped = True

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Prompt:
        intake = RequestIntake(self.tokenizer, self.tokenizer.vocab_size, self.max_model_len, time.monotonic)
        return intake.validate(prompt_token_ids, params)

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> AsyncGenerator[OutputDelta]:
        if self.is_full:
            raise Overloaded(6.2)
        if self.failed:
            raise Unavailable(self.failed)
        self.seen.append((request_id, tuple(prompt.token_ids.tolist()), params))
        self.contexts.append(context)
        self.num_open += 1
        self._stats.num_requests += 1
        is_complete = False
        try:
            for count, delta in enumerate(self._deltas(request_id, prompt.token_ids.tolist(), params)):
                if count == self.hold_after:
                    if self.error is not None:
                        raise self.error
                    if self.gives_up is not None:
                        for index in range(params.n):
                            yield OutputDelta(request_id, index, finish_reason=self.gives_up, device_usage=device_usage(0, bool(count)))
                        is_complete = True
                        return
                    await self.hold.wait()
                await asyncio.sleep(0)
                self._stats.num_output_tokens += len(delta.token_ids)
                yield delta
            is_complete = True
        finally:
            self.num_open -= 1
            if not is_complete:
                self.aborted.append(request_id)

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds], context: RequestContext = DEFAULT_CONTEXT) -> Embedded:
        if self.is_full:
            raise Overloaded(6.2)
        if self.failed:
            raise Unavailable(self.failed)
        self.embedded.append([token_ids.tolist() for token_ids in token_lists])
        is_complete = False
        self.num_open += 1
        try:
            if self.error is not None:
                raise self.error
            await self.hold.wait()
            is_complete = True
            return Embedded(request_id, np.stack([embedding(token_ids.tolist()) for token_ids in token_lists]), device_usage(0))
        finally:
            self.num_open -= 1
            if not is_complete:
                self.aborted.append(request_id)

    def _deltas(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> list[OutputDelta]:
        room = self.max_model_len - len(prompt)
        budget = room if params.max_tokens is None else min(params.max_tokens, room)
        deltas = []
        for index in range(params.n):
            is_first, num_left = True, budget
            for character in self.answer:
                ids = tuple(self.tokenizer.encode(character, False))[:num_left]
                num_left -= len(ids)
                deltas.append(self._delta(request_id, index, character, ids, prompt, params, is_first=is_first))
                is_first = False
                if not num_left:
                    break
            reason = FinishReason.STOP if num_left else FinishReason.LENGTH
            self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
            deltas.append(OutputDelta(request_id, index, finish_reason=reason, device_usage=device_usage(index + 1)))
        return deltas

    def _delta(
        self, request_id: str, index: int, text: str, ids: tuple[int, ...], prompt: Sequence[int], params: SamplingParams, *, is_first: bool
    ) -> OutputDelta:
        logprobs = prompt_logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(_logprob(i, params.logprobs) for i in ids)
        if is_first and index == 0 and params.prompt_logprobs is not None:
            prompt_logprobs = (None, *(_logprob(i, params.prompt_logprobs) for i in prompt[1:]))
        text = text if ids else ""
        if is_first and params.echo:
            text = self.tokenizer.decode(prompt) + text
        cached = 0
        if is_first and len(prompt) > 3:  # siblings start from what the first sequence computed
            cached = len(prompt) - 1 if index else 3
        return OutputDelta(request_id, index, text, ids, logprobs or (), prompt_logprobs=prompt_logprobs, cached_tokens=cached)


def embedding(token_ids: list[int]) -> np.ndarray:
    """Of a text: of length 1, and another for each."""
    vector = np.random.default_rng(token_ids).standard_normal(EMBEDDING_SIZE).astype(np.float32)
    return vector / np.linalg.norm(vector)


def device_usage(num_sequences: int, is_prefilled: bool = True) -> DeviceUsage:
    """After that many sequences of a request."""
    return DeviceUsage(0.25, 0.5 * is_prefilled, 0.125 * num_sequences)


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    """Token t has log-probability -t/100; the likeliest are 0, 1, 2..., so the sampled one is usually not among them."""
    return TokenLogprob(token_id, -token_id / 100, tuple((i, -i / 100) for i in range(num_top)))
