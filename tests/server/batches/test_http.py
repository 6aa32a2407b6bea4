"""/v1/files and /v1/batches over HTTP: the objects' shapes, what is refused and how, and whose they are."""

import json
import time

import pytest
from fastapi.testclient import TestClient

from server.config import ServerConfig
from server.openai.app import create_app
from tests.server.batches.conftest import CHAT, line
from tests.server.fakes import FakeBackend

ENDPOINT = {"endpoint": "/v1/completions", "completion_window": "24h"}


def upload(client, *lines, **headers):
    answer = client.post("/v1/files", files={"file": ("in.jsonl", "\n".join(lines))}, data={"purpose": "batch"}, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def create(client, file, **fields):
    answer = client.post("/v1/batches", json=ENDPOINT | {"input_file_id": file["id"]} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(client, batch, **headers):
    for _ in range(500):
        batch = client.get(f"/v1/batches/{batch['id']}", **headers).json()
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.01)
    raise AssertionError(batch)


def test_a_file_is_as_openai_shows_it(client, clock):
    file = upload(client, line("a"))
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(line("a")),
        "created_at": clock(),
        "expires_at": clock() + 30 * 24 * 3600,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert client.get(f"/v1/files/{file['id']}").json() == file
    listed = {"object": "list", "data": [file], "first_id": file["id"], "last_id": file["id"], "has_more": False}
    assert client.get("/v1/files").json() == listed
    content = client.get(f"/v1/files/{file['id']}/content")
    assert (content.text, content.headers["content-type"]) == (line("a"), "application/octet-stream")
    assert content.headers["x-content-type-options"] == "nosniff"
    assert client.delete(f"/v1/files/{file['id']}").json() == {"id": file["id"], "object": "file", "deleted": True}
    assert client.get(f"/v1/files/{file['id']}/content").status_code == 404
    assert client.get("/v1/files").json() == {"object": "list", "data": [], "has_more": False}


def test_a_batch_is_as_openai_shows_it(client, clock, backend):
    backend.hold.clear()
    file = upload(client, line("a"))
    made = create(client, file, metadata={"k": "v"})
    assert made == {
        "id": made["id"],
        "object": "batch",
        "endpoint": "/v1/completions",
        "input_file_id": file["id"],
        "completion_window": "24h",
        "status": "validating",
        "created_at": clock(),
        "expires_at": clock() + 24 * 3600,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
        "metadata": {"k": "v"},
    }
    clock.seconds += 5
    backend.hold.set()
    done = ended(client, made)
    assert (done["status"], done["completed_at"], done["created_at"]) == ("completed", clock(), clock() - 5)
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert (done["usage"]["input_tokens"], done["usage"]["input_tokens_details"]) == (3, {"cached_tokens": 0})
    assert done["usage"]["total_tokens"] == 3 + done["usage"]["output_tokens"]
    listed = client.get("/v1/batches").json()
    assert listed == {"object": "list", "data": [done], "first_id": done["id"], "last_id": done["id"], "has_more": False}
    output = client.get(f"/v1/files/{done['output_file_id']}").json()
    assert (output["purpose"], output["filename"], "expires_at" in output) == ("batch_output", f"{done['id']}_output.jsonl", False)


def test_a_wrong_input_fails_the_batch_with_each_lines_error(client):
    lines = [line("a"), "bad", line("a"), line("b", "/v1/chat/completions", CHAT)]
    failed = ended(client, create(client, upload(client, *lines)))
    assert (failed["status"], failed["errors"]["object"], "output_file_id" in failed) == ("failed", "list", False)
    assert [(error["code"], error["line"], error["param"]) for error in failed["errors"]["data"]] == [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 3, "custom_id"),
        ("url_mismatch", 4, "url"),
    ]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "purpose", "missing_required_parameter"),
        ({"purpose": "fine-tune"}, "purpose", "invalid_value"),
        ({"purpose": "batch", "porpoise": "x"}, "porpoise", "unknown_parameter"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after.seconds", "missing_required_parameter"),
        ({"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after.anchor", "invalid_value"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "expires_after.seconds",
            "invalid_value",
        ),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"},
            "expires_after.seconds",
            "invalid_type",
        ),
    ],
)
def test_an_upload_that_makes_no_sense_is_refused(client, store, fields, param, code):
    answer = client.post("/v1/files", files={"file": ("in.jsonl", "x")}, data=fields)
    assert (answer.status_code, answer.json()["error"]["param"], answer.json()["error"]["code"]) == (400, param, code)
    assert list(store.files.path("").iterdir()) == []


@pytest.mark.parametrize(
    "request_body",
    [
        {"json": {"file": "x", "purpose": "batch"}},
        {"data": {"file": "x", "purpose": "batch"}},
        {"content": b"no boundary", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"--b\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"files": [("file", ("a", "x")), ("file", ("b", "y"))]},
        {},
    ],
)
def test_what_is_no_upload_is_refused(client, request_body):
    answer = client.post("/v1/files", **request_body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"input_file_ids": "x"}, "input_file_ids"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(client, fields, param):
    body = ENDPOINT | {"input_file_id": upload(client, line("a"))["id"]} | fields
    answer = client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=10001", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/files?after=batch_1", "after"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?limit=many", "limit"),
        ("/v1/batches?after=file-1", "after"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(client, path, param):
    answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_pages_say_whether_there_is_more(client):
    ids = [upload(client, line("a"))["id"] for _ in range(5)][::-1]
    page = client.get("/v1/files?limit=2").json()
    assert ([file["id"] for file in page["data"]], page["first_id"], page["last_id"], page["has_more"]) == (ids[:2], ids[0], ids[1], True)
    page = client.get(f"/v1/files?limit=3&after={ids[1]}").json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[2:], False)
    page = client.get(f"/v1/files?order=asc&after={ids[1]}").json()
    assert [file["id"] for file in page["data"]] == ids[:1]
    assert client.get("/v1/files?purpose=batch_output").json()["data"] == []


def test_a_file_may_be_as_large_as_the_limit(backend, tokenizer, store):
    with TestClient(create_app(backend, tokenizer, ServerConfig(max_file_size="100KiB"), store=store)) as client:
        assert upload(client, "x" * 102_400)["bytes"] == 102_400
        for size in (102_401, 200_000, 5_000_000):
            answer = client.post("/v1/files", files={"file": ("a", "x" * size)}, data={"purpose": "batch"})
            assert answer.status_code == 413, size
            assert answer.json()["error"]["code"] in ("file_too_large", "body_too_large")
        chunks = (b"x" * 10_000 for _ in range(1000))  # no Content-Length
        endless = client.post("/v1/files", content=chunks, headers={"content-type": "multipart/form-data; boundary=b"})
        assert endless.status_code == 413
    assert len(list(store.files.path("").iterdir())) == 1


def test_a_key_sees_its_own_alone(backend, tokenizer, store):
    config = ServerConfig(served_model_name=("tiny",), api_keys=("one", "two"))
    one, two = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two"))
    with TestClient(create_app(backend, tokenizer, config, store=store)) as client:
        assert client.get("/v1/files").status_code == client.get("/v1/batches").status_code == 401
        file = upload(client, line("a"), **one)
        batch = client.post("/v1/batches", json=ENDPOINT | {"input_file_id": file["id"]}, **one).json()
        done = ended(client, batch, **one)
        for id in (file["id"], done["output_file_id"]):
            for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
                assert client.request(method, f"/v1/files/{id}{path}", **two).status_code == 404
        assert client.get(f"/v1/batches/{batch['id']}", **two).status_code == 404
        assert client.post(f"/v1/batches/{batch['id']}/cancel", **two).status_code == 404
        assert client.post("/v1/batches", json=ENDPOINT | {"input_file_id": file["id"]}, **two).status_code == 400
        assert client.get("/v1/files", **two).json()["data"] == client.get("/v1/batches", **two).json()["data"] == []
        assert len(client.get("/v1/files", **one).json()["data"]) == 2
        assert json.loads(client.get(f"/v1/files/{done['output_file_id']}/content", **one).text)["custom_id"] == "a"
        metrics = client.get("/metrics").text
    [context] = backend.contexts
    assert f'jaxinfer_tenant_requests_total{{outcome="finished",tenant="{context.tenant}"}} 1.0' in metrics


def test_metrics_count_lines(client):
    ended(client, create(client, upload(client, line("a"), line("b"), line("c", body={}))))
    metrics = client.get("/metrics").text
    assert 'jaxinfer_batch_lines_total{outcome="completed"} 2.0' in metrics
    assert 'jaxinfer_batch_lines_total{outcome="failed"} 1.0' in metrics
    assert "jaxinfer_batch_lines_waiting 0.0" in metrics


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/file-1/content"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/batches/b/cancel"),
    ],
)
def test_without_a_folder_the_answer_says_what_to_do(backend, tokenizer, config, method, path):
    with TestClient(create_app(backend, tokenizer, config)) as client:
        answer = client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batches_disabled")
        assert "--batch-dir" in answer.json()["error"]["message"]
        assert not [path for path in client.get("/openapi.json").json()["paths"] if "batch" in path]


def test_while_the_server_ends_no_further_line_is_asked(backend, tokenizer, config, store):
    backend.hold.clear()
    app = create_app(backend, tokenizer, config, store=store)
    with TestClient(app) as client:
        batch = create(client, upload(client, *[line(str(n)) for n in range(20)]))
        while backend.num_open < 7:
            time.sleep(0.01)
        app.state.traffic.close()  # SIGTERM: interactive requests, and the lines under way, may still finish
        backend.hold.set()
        while store.read(batch["id"]).num_completed < 7:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(backend.seen) == 7
    with TestClient(create_app(backend, tokenizer, config, store=store)) as client:
        assert ended(client, batch)["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert len(backend.seen) == 20


def test_lines_under_way_are_aborted_before_the_backend_stops_and_asked_again(tokenizer, config, store):
    class Watched(FakeBackend):
        num_open_at_stop = None

        async def stop(self):
            self.num_open_at_stop = self.num_open
            await super().stop()

    backend = Watched(tokenizer)
    backend.hold.clear()
    with TestClient(create_app(backend, tokenizer, config, store=store)) as client:
        batch = create(client, upload(client, *[line(str(n)) for n in range(20)]))
        while backend.num_open < 7:
            time.sleep(0.01)
    assert (len(backend.aborted), backend.num_open_at_stop) == (7, 0)
    backend.hold.set()
    with TestClient(create_app(backend, tokenizer, config, store=store)) as client:
        assert ended(client, batch)["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert len(backend.seen) == 27


def test_what_is_created_or_cancelled_is_seen_to_at_once(client, backend, monkeypatch):
    monkeypatch.setattr("server.batches.runner.LOOK_SECONDS", 1000.0)
    assert ended(client, create(client, upload(client, line("a"))))["status"] == "completed"
    backend.hold.clear()
    batch = create(client, upload(client, line("a")))
    while not backend.num_open:
        time.sleep(0.01)
    client.post(f"/v1/batches/{batch['id']}/cancel")
    assert ended(client, batch)["status"] == "cancelled"
