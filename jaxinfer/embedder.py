"""Embedder: offline, blocking embeddings of texts, without a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxinfer.config import EngineConfig
from jaxinfer.encode.loading import load_encoder
from jaxinfer.encode.text_batching import Embedded, Text, TextReader, TokenIds, cut
from jaxinfer.encode.worker import EncodeWorker
from jaxinfer.engine.builder import split_cpu
from jaxinfer.engine_access import EngineAccess
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.kv_transfer.remote import Remote
from jaxinfer.listeners import Answers, Failed
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.programs.compilation import use_persistent_cache
from jaxinfer.prompts import as_prompts
from jaxinfer.request import DEFAULT_CONTEXT, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats


class Embedder:
    """`Embedder(model=..., dtype=..., prefill_devices=..., cpu_devices=...)`: an encoder, named as `embedding_model`
    is, and settings of `EngineConfig` by name. The constructor blocks until it is ready; then any thread may call it.
    Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError`."""

    def __init__(self, model: str = "minilm", **settings: Any) -> None:
        config = EngineConfig.of(embedding_model=model, **settings)
        self.stats = EngineStats()
        use_persistent_cache()
        split_cpu(config.devices.cpu_devices)
        self._worker = load_encoder(config, self.stats, DeviceClock())
        self._reader, self._engine_loop = self._worker.reader, EngineLoop(_EncoderEngine(self._worker))
        self.tokenizer = self._reader.tokenizer
        self.embedding_size = self._reader.embedding_size
        self.max_tokens = self._reader.max_tokens  # of a text

    def embed(
        self, texts: Text | Iterable[Text], *, dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> Float32[np.ndarray, "N D"]:
        """An embedding a row, in the order of texts (or their token ids); of length 1 if the model normalises.

        `dimensions` truncates each embedding and normalises it again. A text is truncated to its first
        `truncate_prompt_tokens` tokens; -1: to the model's maximum. Raises `RequestError` for the first text that is
        empty or too long, before any is computed.
        """
        self._engine_loop.check()
        return embed(self._engine_loop, self._reader, texts, dimensions, truncate_prompt_tokens)


def embed(
    engine_loop: EngineLoop, reader: TextReader, texts: Text | Iterable[Text], dimensions: int | None, truncate_prompt_tokens: int | None
) -> Float32[np.ndarray, "N D"]:
    """See `Embedder.embed`."""
    token_lists = read_texts(reader, texts, dimensions, truncate_prompt_tokens)
    if not token_lists:
        return np.empty((0, dimensions or reader.embedding_size), np.float32)
    answers, request_id = Answers(), engine_loop.new_id()
    is_done = False
    try:
        engine_loop.embed(request_id, token_lists, answers)
        [event] = answers.get()
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Embedded)
        is_done = True
        return cut(event.embeddings, dimensions)
    finally:
        if not is_done:
            engine_loop.abort([request_id], wait=True)


def read_texts(
    reader: TextReader, texts: Text | Iterable[Text], dimensions: int | None, truncate_prompt_tokens: int | None
) -> list[TokenIds]:
    """Token ids of each text; empty for no text. Raises `RequestError` as `Embedder.embed` does."""
    reader.check_dimensions(dimensions)
    truncation = None if truncate_prompt_tokens is None else reader.truncation(truncate_prompt_tokens)
    several = as_prompts(texts, "texts")
    return reader.read(several, "texts", truncation) if several else []


class _EncoderEngine:
    """An engine without a language model. See `Drivable`."""

    has_requests = has_work = False
    shares_mesh = True

    def __init__(self, encode: EncodeWorker) -> None:
        self.access = EngineAccess()
        self.encode: EncodeWorker | None = encode

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        remote: Remote | None = None,
        output_ids: tuple[int, ...] = (),
    ) -> None:
        raise AssertionError

    def step(self) -> list[OutputDelta]:
        return []

    def abort(self, request_id: str) -> bool:
        return False

    def on_process_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        pass  # an encoder never spans several processes

    def close(self) -> None:
        self.access.close()
