"""A server with a folder for files and batches, over a fake backend; time goes on when a test says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from server.batches.batch_store import BatchStore
from server.openai.app import create_app

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Say"}


def line(custom_id: object, url: str = "/v1/completions", body: object = TEXT, method: str = "POST") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


class SimulatedClock:
    def __init__(self) -> None:
        self.seconds = 1_700_000_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def open_store(tmp_path: Path, clock: SimulatedClock) -> Iterator[Callable[[], BatchStore]]:
    """Opens the test's folder; again after a `close`."""
    opened = []

    def open_store() -> BatchStore:
        opened.append(BatchStore(tmp_path / "batches", clock))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], BatchStore]) -> BatchStore:
    return open_store()


@pytest.fixture
def client(backend, tokenizer, config, store) -> Iterator[TestClient]:
    with TestClient(create_app(backend, tokenizer, config, store=store)) as client:
        yield client
