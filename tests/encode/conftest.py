from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.embedder import Embedder
from tests import tiny_encoder

MakeEmbedder = Callable[..., Embedder]


@pytest.fixture(scope="session")
def embedders(tmp_path_factory: pytest.TempPathFactory) -> MakeEmbedder:
    """Gives the Embedder over a tiny encoder of this kind with these settings, made on first use."""
    made: dict[tuple[Any, ...], Embedder] = {}

    def make(pooling: str = "mean", *, normalizes: bool = True, **settings: Any) -> Embedder:
        key = (pooling, normalizes, *sorted(settings.items()))
        if key not in made:
            folder = tiny_encoder.write(tmp_path_factory.mktemp("encoder"), pooling=pooling, normalizes=normalizes)
            made[key] = Embedder(str(folder), **{"dtype": "float32"} | settings)
        return made[key]

    return make


@pytest.fixture(scope="session")
def embedder(embedders: MakeEmbedder) -> Embedder:
    """Of unit means, on one device."""
    return embedders()
