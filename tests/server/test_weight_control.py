"""The paths that change a model's weights, over a real engine: who may, what waits, what is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save_file

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from server.config import ServerConfig
from server.local_backend import LocalBackend
from server.openai.app import create_app
from tests import tiny_model
from tests.conftest import TINY
from tests.server.serving import served

SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (64,), "prefill_chunk_size": 64}
BODY = {"model": "tiny", "prompt": list(range(20)), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 400}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    first, second = (tiny_model.write(tmp_path_factory.mktemp("weights") / name) for name in ("first", "second"))
    save_file({name: tensor[::-1].copy() for name, tensor in tiny_model.tensors().items()}, second / "model.safetensors")
    return [first, second]


@pytest.fixture(scope="module")
def api(folders: list[Path]) -> Iterator[httpx.Client]:
    engine = Engine(EngineConfig.of(model=str(folders[0]), **(TINY | SMALL)))
    config = ServerConfig(
        served_model_name=("tiny",), weight_control=True, api_keys=("usual", "urgent"), priority_keys=("urgent",), log_level="warning"
    )
    app = create_app(LocalBackend(engine), engine.tokenizer, config)
    with served(app, config) as url, httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer urgent"}) as client:
        yield client


def text(api: httpx.Client, body: dict[str, object] = BODY) -> str:
    answer = api.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_sleep_wake_and_update(api: httpx.Client, folders: list[Path]) -> None:
    before = text(api)
    assert api.post("/v1/models/tiny/sleep", json={"level": 2}).json() == {"version": 1, "is_asleep": True}
    assert api.get("/ready").json() == {"status": "asleep"}
    assert api.get("/health").status_code == 200
    refused = api.post("/v1/completions", json=BODY)
    assert refused.status_code == 503 and "/wake" in refused.json()["error"]["message"]
    assert api.post("/v1/models/tiny/wake", json={}).json() == {"version": 1, "is_asleep": False}
    assert text(api) == before
    assert api.post("/v1/models/tiny/update_weights", json={"path": str(folders[1])}).json()["version"] == 2
    assert text(api) != before
    assert "jaxinfer_weights_version 2.0" in api.get("/metrics").text
    api.post("/v1/models/tiny/update_weights", json={"path": str(folders[0])})
    assert text(api) == before


@pytest.mark.parametrize("in_flight", ["finish", "pause"])
def test_a_request_under_way(api: httpx.Client, folders: list[Path], in_flight: str) -> None:
    """Finishes by the old weights, or goes on by the new ones; what comes meanwhile is by the new ones."""
    whole, new = text(api, LONG), {}
    with api.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        path = {"path": str(folders[1]), "in_flight": in_flight}
        update = threading.Thread(target=lambda: new.update(api.post("/v1/models/tiny/update_weights", json=path).json()))
        update.start()
        num_chunks = sum(line.startswith("data: {") for line in lines)
    update.join()
    assert num_chunks > 10 and new["is_asleep"] is False
    assert text(api, LONG) != whole
    api.post("/v1/models/tiny/update_weights", json={"path": str(folders[0])})
    assert text(api, LONG) == whole


def test_refusals(api: httpx.Client, tmp_path: Path) -> None:
    larger = str(tiny_model.write(tmp_path / "larger", num_hidden_layers=3))
    for path, body, headers, status, message in (
        ("tiny/sleep", {"level": 3}, {}, 400, "level"),
        ("tiny/sleep", {"in_flight": "never"}, {}, 400, "in_flight"),
        ("other/sleep", {}, {}, 404, "other"),
        ("tiny/sleep", {}, {"authorization": "Bearer usual"}, 403, "priority-key-file"),
        ("tiny/update_weights", {"path": larger}, {}, 400, "num_layers"),
        ("tiny/update_weights", {"path": str(tmp_path / "none")}, {}, 400, "none"),
        ("tiny/update_weights", {}, {}, 400, "path"),
    ):
        answer = api.post(f"/v1/models/{path}", json=body, headers=headers)
        assert answer.status_code == status, (path, answer.text)
        assert message in answer.json()["error"]["message"]
    assert api.get("/ready").json() == {"status": "ready"}
