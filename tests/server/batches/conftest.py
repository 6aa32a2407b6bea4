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

TEXTS = {"model": "encoder", "input": ["Hi", "there"]}


def line(custom_id: object, url: str = "/v1/completions", body: object = TEXT, method: str = "POST") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


HALF = "\ud83d"  # of a surrogate pair, which JSON can spell and UTF-8 can't
NO_UNICODE = [
    line("half 1", body=TEXT | {"model": HALF}),
    line(f"half 2 {HALF}"),
    line("half 3", url=f"/v1/completions{HALF}"),
    line("half 4", body=TEXT | {HALF: 1}),
    line("half 5", body=TEXT | {"prompt": f"a{HALF}"}),
    line("half 6", body=TEXT | {"metadata": {HALF: "a"}}),
    line("half 7", method=f"POST{HALF}"),
]


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
