"""A client that goes away aborts what it asked for."""

import asyncio
import json
import socket
import time

import pytest

from server.openai.app import create_app
from tests.server.serving import served

BODIES = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": ["a", "b", "c"]},
}


async def ask_and_leave(app, url, body, leave):
    """Send a request straight to the app and disconnect once `leave(messages sent back)` is true."""
    raw = json.dumps(body).encode()
    unread = [{"type": "http.request", "body": raw, "more_body": False}]
    answered: list[dict] = []

    async def receive():
        if unread:
            return unread.pop()
        while not leave(answered):  # noqa: ASYNC110  (every turn of the loop counts)
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        answered.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "server": ("test", 80),
        "client": ("test", 1),
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())],
    }
    await asyncio.wait_for(app(scope, receive, send), 5)
    return answered


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("hold_after", [0, 3])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_leaving_aborts_every_request_of_the_body(backend, tokenizer, config, url, hold_after, is_streamed):
    app = create_app(backend, tokenizer, config)
    num_prompts = len(BODIES[url].get("prompt", "x"))

    async def run():
        backend.hold.clear()
        backend.hold_after = hold_after
        settled = 0

        def leave(answered):
            nonlocal settled
            settled += 1
            return backend.num_open == num_prompts and settled > 50

        return await ask_and_leave(app, url, BODIES[url] | {"stream": is_streamed}, leave)

    answered = asyncio.run(run())
    assert len(backend.aborted) == num_prompts
    assert backend.num_open == 0
    has_begun = any(message["type"] == "http.response.start" for message in answered)
    assert has_begun == (is_streamed and hold_after > 0)
    status = 200 if has_begun else 499
    assert app.state.traffic.num_answered["POST", url, status] == 1
    assert app.state.traffic.num_open == 0


@pytest.mark.parametrize("is_streamed", [True, False])
def test_closing_the_socket_aborts_and_the_server_goes_on(backend, tokenizer, config, is_streamed):
    backend.hold.clear()
    backend.hold_after = 2
    with served(create_app(backend, tokenizer, config)) as url:
        port = int(url.rpartition(":")[2])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                body = json.dumps(BODIES["/v1/chat/completions"] | {"stream": is_streamed}).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                if is_streamed:
                    assert connection.recv(12) == b"HTTP/1.1 200"
                else:
                    wait_until(lambda: backend.num_open == 1)
            wait_until(lambda: backend.num_open == 0)
        assert len(backend.aborted) == 3


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_leaving_within_the_body_is_no_error_of_the_server(backend, tokenizer, config, caplog):
    app = create_app(backend, tokenizer, config)
    with served(app) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
            )
            wait_until(lambda: app.state.traffic.num_open == 1)
        wait_until(lambda: app.state.traffic.num_open == 0)
    assert app.state.traffic.num_answered == {("POST", "/v1/completions", 499): 1}
    assert not caplog.records
