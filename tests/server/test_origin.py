"""Browsers send what any website asks of them: what a page of elsewhere may do here, by which names, and what it may read."""

from contextlib import closing

import pytest
from fastapi.testclient import TestClient

from jaxinfer.config import ConfigError
from server.batches.batch_store import BatchStore
from server.config import ServerConfig
from server.openai.app import create_app

TEXT = {"model": "tiny", "prompt": "Tell", "max_tokens": 4}
PAGE = "https://chat.example.com"


@pytest.fixture
def asking(backend, tokenizer, tmp_path):
    with closing(BatchStore(tmp_path)) as store:

        def make(**settings):
            config = ServerConfig(served_model_name=("tiny",), **settings)
            return TestClient(create_app(backend, tokenizer, config, store=store), base_url="http://127.0.0.1:8000")

        yield make


def code(response):
    return response.json()["error"]["code"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", ""])
def test_a_json_body_must_be_declared_as_such(asking, backend, content_type):
    """A page may send these three without asking first, and an untyped Blob without any."""
    headers = {} if content_type is None else {"content-type": content_type}
    with asking() as client:
        for url in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/batches"):
            response = client.post(url, content=b'{"model": "tiny", "prompt": "x"}', headers=headers)
            assert (response.status_code, code(response)) == (400, "invalid_content_type"), url
    assert backend.seen == []


@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1:3000", "http://localhost:8000", "nonsense", "http://127.0.0.1:nan"])
def test_a_page_of_elsewhere_changes_nothing(asking, backend, origin):
    with asking() as client:
        sent = {
            "/v1/completions": {"json": TEXT},
            "/v1/files": {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}},
            "/v1/batches/batch_1/cancel": {},
        }
        for url, body in sent.items():
            response = client.post(url, headers={"origin": origin}, **body)
            assert (response.status_code, code(response)) == (403, "origin_not_allowed"), url
            assert "--cors-origins" in response.json()["error"]["message"]
        assert client.delete("/v1/files/file-1", headers={"origin": origin}).status_code == 403
        assert client.get("/v1/files").json()["data"] == []
    assert backend.seen == []


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://127.0.0.1:8000", {}),  # no browser
        ("http://127.0.0.1:8000", {"origin": "http://127.0.0.1:8000"}),
        ("http://localhost", {"origin": "http://localhost:80"}),
        ("http://[::1]:8000", {"origin": "http://[::1]:8000"}),
        ("http://localhost", {"origin": "https://localhost"}),  # behind a proxy that ends TLS
        ("http://10.0.0.7:8000", {"origin": PAGE, "sec-fetch-site": "same-origin"}),  # behind one that changes the Host
    ],
)
def test_its_own_page_and_programs_are_let_in(asking, url, headers):
    with asking() as client:
        assert client.post(f"{url}/v1/completions", json=TEXT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("settings", "host", "is_allowed"),
    [
        ({}, "rebound.example.com:8000", False),
        ({"host": "0.0.0.0"}, "rebound.example.com:8000", False),
        ({"host": "0.0.0.0"}, "192.168.1.20:8000", True),
        ({"host": "::"}, "[fd00::7]:8000", True),
        ({"host": "Box.lan"}, "box.lan:8000", True),
        ({}, "testserver", True),  # this machine's name, as the fixtures have it
        ({}, "a.localhost", True),
        ({}, "localhost.example.com", False),
        ({}, "127.0.0.1.example.com", False),
        ({"allowed_hosts": ("llm.example.com",)}, "LLM.example.com.:8000", True),
        ({"allowed_hosts": ("llm.example.com",)}, "other.example.com", False),
        ({"allowed_hosts": ("llm.example.com",)}, "127.0.0.1", True),
        ({"allowed_hosts": ("*.example.com",)}, "a.example.com", True),
        ({"allowed_hosts": ("*.example.com",)}, "example.org", False),
        ({"allowed_hosts": ("*",)}, "rebound.example.com", True),
        ({"api_keys": ("secret",)}, "rebound.example.com", True),  # no website knows the key
        ({"api_keys": ("secret",), "allowed_hosts": ("llm.example.com",)}, "rebound.example.com", False),
    ],
)
def test_a_name_that_a_website_could_point_here_is_refused(asking, settings, host, is_allowed):
    with asking(**settings) as client:
        headers = {"host": host, "authorization": "Bearer secret"}
        for url in ("/v1/models", "/metrics", "/"):
            response = client.get(url, headers=headers)
            assert response.status_code == (200 if is_allowed else 403), url
            if not is_allowed:
                assert (
                    code(response) == "host_not_allowed" and f"--allowed-hosts {host.split(':')[0]}" in response.json()["error"]["message"]
                )
        assert client.get("/health", headers=headers).status_code == 200, "a load balancer's probe"


def test_pages_of_listed_origins_may_ask_and_read_errors_too(asking, backend):
    preflight = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    with asking(cors_origins=(PAGE,), api_keys=("secret",)) as client:
        answer = client.options("/v1/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert (
            "access-control-allow-origin" not in client.options("/v1/completions", headers=preflight | {"origin": "https://a.org"}).headers
        )
        key = {"authorization": "Bearer secret"}
        for expected, headers, body in ((200, key, TEXT), (401, {}, TEXT), (400, key, {"model": 3}), (404, key, TEXT | {"model": "none"})):
            response = client.post("/v1/completions", json=body, headers={"origin": PAGE} | headers)
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (expected, PAGE)
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        backend.is_full = True
        assert client.post("/v1/completions", json=TEXT, headers={"origin": PAGE} | key).headers["access-control-allow-origin"] == PAGE
        assert client.post("/v1/completions", json=TEXT, headers={"origin": "https://a.org"} | key).status_code == 403
    with asking(cors_origins=("*",)) as client:
        assert client.post("/v1/completions", json={"model": 3}, headers={"origin": "null"}).headers["access-control-allow-origin"] == "*"


def test_without_listed_origins_nothing_is_told_to_other_pages(asking):
    with asking() as client:
        assert not [name for name in client.get("/v1/models", headers={"origin": PAGE}).headers if name.startswith("access-control")]


@pytest.mark.parametrize("settings", [{"cors_origins": ("chat.example.com",)}, {"cors_origins": (PAGE + "/",)}, {"allowed_hosts": (PAGE,)}])
def test_what_is_no_origin_or_name_is_told_at_start(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings)
