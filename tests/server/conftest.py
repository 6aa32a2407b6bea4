"""The app over a fake backend, without a socket."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from jaxinfer.tokenizer import Tokenizer
from server.config import ServerConfig
from server.logs import PACKAGES
from server.openai.app import create_app
from tests.server.fakes import FakeBackend, byte_tokenizer


@pytest.fixture(autouse=True)
def named_testserver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without keys knows this machine's own name, and the test client's Host is this."""
    monkeypatch.setattr("socket.gethostname", lambda: "testserver")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """`jaxinfer serve` configures the whole process's."""
    loggers = [logging.getLogger(name) for name in ("", *PACKAGES)]
    handlers, levels = loggers[0].handlers[:], [logger.level for logger in loggers]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


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
