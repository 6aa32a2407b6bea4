"""The app over a fake backend, without a socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from jaxinfer.tokenizer import Tokenizer
from server.config import ServerConfig
from server.openai.app import create_app
from tests.server.fakes import FakeBackend, byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def backend(tokenizer: Tokenizer) -> FakeBackend:
    return FakeBackend(tokenizer)


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(served_model_name=("tiny", "org/tiny"), served_embedding_name=("encoder",), max_body_size="64KiB")


@pytest.fixture
def client(backend: FakeBackend, tokenizer: Tokenizer, config: ServerConfig) -> Iterator[TestClient]:
    with TestClient(create_app(backend, tokenizer, config)) as client:
        yield client
