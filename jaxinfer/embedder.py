"""Embedder: texts to vectors, offline and blocking, without a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxinfer.assembly import split_cpu
from jaxinfer.config import EngineConfig
from jaxinfer.encode.loading import load_encoder
from jaxinfer.encode.texts import Text, cut
from jaxinfer.encode.worker import EncodeWorker
from jaxinfer.runtime.compilation import use_persistent_cache
from jaxinfer.runtime.device_clock import DeviceClock
from jaxinfer.stats import EngineStats

_REQUEST_ID = "embed"


class Embedder:
    """`Embedder(model=..., dtype=..., prefill_devices=..., cpu_devices=...)`: an encoder as `embedding_model` names it, and settings of
    `EngineConfig` by their names. Blocks until it is ready. Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError`."""

    def __init__(self, model: str = "minilm", **settings: Any) -> None:
        config = EngineConfig.of(embedding_model=model, **settings)
        self.stats = EngineStats()
        use_persistent_cache()
        split_cpu(config.devices.cpu_devices)
        self._worker = load_encoder(config, self.stats, DeviceClock())
        self.tokenizer = self._worker.reader.tokenizer
        self.embedding_size = self._worker.reader.embedding_size
        self.max_tokens = self._worker.reader.max_tokens  # of a text

    def embed(self, texts: Text | Sequence[Text], *, dimensions: int | None = None) -> Float32[np.ndarray, "N D"]:
        """A row for each text (or its token ids), in the texts' order; of length 1 where the model normalises.

        `dimensions` keeps that many of each embedding and brings it to length 1 again. Raises `RequestError` for the first text that
        is empty or too long, before any is computed.
        """
        return embed(self._worker, texts, dimensions)


def embed(worker: EncodeWorker, texts: Text | Sequence[Text], dimensions: int | None) -> Float32[np.ndarray, "N D"]:
    """See `Embedder.embed`. The worker must have nothing else to do."""
    reader = worker.reader
    reader.check_dimensions(dimensions)
    several = _as_texts(texts)
    if not several:
        return np.empty((0, dimensions or reader.embedding_size), np.float32)
    worker.add(_REQUEST_ID, reader.read(several, "texts"))
    try:
        while True:
            for done in worker.step():
                return cut(done.embeddings, dimensions)
    finally:
        worker.abort(_REQUEST_ID)  # if it was interrupted


def _as_texts(texts: Text | Sequence[Text]) -> Sequence[Text]:
    if isinstance(texts, str) or (len(texts) and isinstance(texts[0], int)):
        return [texts]  # type: ignore[list-item]
    return texts  # type: ignore[return-value]
