"""Every line has its time and level, one that belongs to a request its id and tenant, and a client's own id is kept."""

import io
import json
import logging
import re

import pytest
from fastapi.testclient import TestClient

from server.api_keys import tenant_name
from server.config import ServerConfig
from server.logs import configure
from server.openai.app import create_app
from server.usage_log import UsageLog

TEXT = {"model": "tiny", "prompt": "Tell", "max_tokens": 4}
KEY = {"authorization": "Bearer a-secret"}
TENANT = tenant_name("a-secret")


@pytest.fixture
def log(monkeypatch):
    """Makes what is logged go to the text that it returns."""

    def start(level, format):
        text = io.StringIO()
        monkeypatch.setattr("sys.stderr", text)
        configure(level, format)
        return text

    return start


@pytest.fixture
def serving(backend, tokenizer):
    def make(usage_log=None, **settings):
        config = ServerConfig(served_model_name=("tiny",), api_keys=("a-secret",), **settings)
        return TestClient(create_app(backend, tokenizer, config, usage_log), raise_server_exceptions=False)

    return make


def test_json_lines_carry_the_requests_id_and_tenant(serving, backend, log):
    text = log("info", "json")
    with serving() as client:
        client.post("/v1/completions?key=hidden", json=TEXT, headers=KEY | {"x-request-id": "trace-1"})
        backend.error = ZeroDivisionError("a bug")
        client.post("/v1/completions", json=TEXT | {"stream": True}, headers=KEY | {"x-request-id": "trace-2"})
        client.post("/v1/completions", json=TEXT, headers={"x-request-id": "trace-3", "authorization": "Bearer wrong-secret"})
        client.get("/health")
        logging.getLogger("server").warning("of no request")
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    first, fault, second, refused, last = [line for line in lines if line["logger"].startswith("server")]
    assert first | {"time": 0, "seconds": 0, "message": ""} == {
        "time": 0, "level": "info", "logger": "server.access", "message": "", "request_id": "trace-1", "tenant": TENANT,
        "client": "testclient", "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 0,
    }  # fmt: skip
    assert (fault["level"], fault["request_id"], fault["tenant"]) == ("error", "trace-2", TENANT)
    assert "ZeroDivisionError" in fault["exception"]
    assert (second["request_id"], second["status"], second["error"]) == ("trace-2", 500, "internal_error")
    assert (refused["request_id"], refused["tenant"], refused["status"], refused["error"]) == ("trace-3", None, 401, "invalid_api_key")
    assert "request_id" not in last
    assert "secret" not in text.getvalue() and "hidden" not in text.getvalue()


def test_text_lines_carry_them_too(serving, log):
    text = log("debug", "text")
    with serving() as client:
        client.post("/v1/completions", json={"model": 3}, headers=KEY | {"x-request-id": "trace-1"})
        client.get("/health", headers={"x-request-id": "probe"})
    one, probe = [line for line in text.getvalue().splitlines() if "server.access" in line]
    says = rf"\S+Z INFO server.access \[trace-1 {TENANT}\]: testclient POST /v1/completions 400 invalid_type in 0\.\d+ s"
    assert re.fullmatch(says, one)
    assert " DEBUG server.access [probe]: " in probe


def test_the_access_log_can_be_turned_off(serving, log):
    text = log("debug", "text")
    with serving(access_log=False) as client:
        client.get("/v1/models", headers=KEY)
    assert "server.access" not in text.getvalue()


@pytest.mark.parametrize("sent", ["trace-1", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a" * 128, "Root=1-5f:x/y~z@a+b_c"])
def test_a_clients_request_id_is_kept_and_returned(serving, sent):
    with serving() as client:
        for url in ("/health", "/v1/models", "/v1/none"):
            assert client.get(url, headers={"x-request-id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a" * 129, "two words", "é", 'a"b', "a\tb", "<script>"])
def test_one_that_a_log_line_could_not_hold_is_replaced(serving, sent):
    with serving() as client:
        returned = client.get("/health", headers=[(b"x-request-id", sent.encode("latin-1"))]).headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{32}", returned)


def test_refusals_leave_a_line_in_the_usage_log(serving, backend, tmp_path):
    path = tmp_path / "usage.jsonl"
    with UsageLog(str(path)) as usage_log, serving(usage_log) as client:

        def ask(id, status, headers=KEY, url="/v1/completions", **change):
            assert client.post(url, json=TEXT | change, headers=headers | {"x-request-id": id}).status_code == status

        ask("answered", 200)
        ask("no-key", 401, headers={})
        ask("bad", 400, n=0)
        ask("nowhere", 404, url="/v1/made/up")
        ask("elsewhere", 403, headers=KEY | {"origin": "https://a.org"})
        backend.is_full = True
        ask("full", 429)
        ask("full-stream", 429, stream=True)
        client.get("/no/api")
    answered, *refused = [json.loads(line) for line in path.read_text().splitlines()]
    assert (answered["request_id"], answered["outcome"]) == ("answered", "finished")
    assert {line["outcome"] for line in refused} == {"refused"}
    url = "/v1/completions"
    assert [tuple(line[name] for name in ("request_id", "tenant", "endpoint", "status", "error")) for line in refused] == [
        ("no-key", None, "other", 401, "invalid_api_key"),
        ("bad", TENANT, url, 400, "invalid_value"),
        ("nowhere", TENANT, "other", 404, "unknown_url"),
        ("elsewhere", None, "other", 403, "origin_not_allowed"),
        ("full", TENANT, url, 429, "rate_limit_exceeded"),
        ("full-stream", TENANT, url, 429, "rate_limit_exceeded"),
    ]
