from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.machine import BackgroundLoad
from benchmarks.peers import embedding_rates
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.measures import Measures
from benchmarks.worker import WorkerError


class FakeEmbedder:
    """Takes 2 s for its texts in float32 and 1 s in bfloat16, where it turns every second one's embedding around."""

    def __init__(self, python: str, module: str, folder: str, dtype: str, threads: str) -> None:
        if "transformers" in module and dtype == "bfloat16":
            raise WorkerError("no such type")
        self.dtype = dtype
        self.num_warm = 0

    def ask(self, texts: list[str], warm: bool) -> dict[str, Any]:
        self.num_warm += warm
        assert self.num_warm <= len(embedding_rates.CASES)
        made = np.eye(len(texts))
        if self.dtype == "bfloat16":
            made[::2] = np.roll(made[::2], 1, axis=1) * 0.6 + made[::2] * 0.8
        return {"seconds": 2.0 if self.dtype == "float32" else 1.0, "embeddings": made.tolist(), "notes": ""}

    def close(self) -> None: ...


def test_both_embed_in_the_types_they_have_and_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_rates, "Worker", FakeEmbedder)
    measures, lost = Measures(), {}
    embedding_rates.measure_embeddings(ENGINES, Path("/models/minilm"), 2, 4, 2, measures, lost, BackgroundLoad(), lambda text: None)
    assert lost == {"transformers bfloat16": "embedding: no such type"}
    rates = measures.of(embedding_rates.PART)
    assert len(rates) == len(embedding_rates.CASES)
    assert rates[0].values == {"jaxinfer float32": [2, 2], "jaxinfer bfloat16": [4, 4], "transformers float32": [2, 2]}
    [alike, *_] = measures.of(embedding_rates.SIMILARITY)
    assert {name: values[0] for name, values in alike.values.items()} == {
        "jaxinfer float32": 1,
        "jaxinfer bfloat16": pytest.approx(0.8),
        "transformers float32": 1,
    }
