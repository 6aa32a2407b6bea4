"""Half-sent heads and bodies, silent and idle sockets end in time, connections are bounded, and no answer under way is cut by it."""

import json
import socket
import time
from contextlib import ExitStack, contextmanager

import pytest
from fastapi.responses import StreamingResponse

from server.config import ServerConfig
from server.openai.app import create_app
from tests.server.serving import served

LIMITS = {"head_timeout": 0.3, "body_timeout": 0.3, "idle_timeout": 0.4, "write_timeout": 0.5, "log_level": "warning"}
BODY = json.dumps({"model": "tiny", "prompt": "Tell", "max_tokens": 100}).encode()
STREAM = BODY[:-1] + b', "stream": true}'


def head(length, path="/v1/completions"):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected(url, *sent):
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)  # else the kernel reads in its client's stead
        connection.settimeout(5)
        connection.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        for data in sent:
            connection.sendall(data)
        yield connection


def rest(connection):
    """What comes until the server closes, and the seconds that it took."""
    start, received = time.monotonic(), b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received, time.monotonic() - start


def drip(connection, data):
    """The same, with a byte sent every 50 ms as long as that goes: each would put off a timer that counts from the last byte."""
    start = time.monotonic()
    connection.settimeout(0.05)
    for number in range(200):
        try:
            if not connection.recv(65536):
                break
        except TimeoutError:
            connection.sendall(data[number % len(data) :][:1])
        except ConnectionResetError:
            break
    return time.monotonic() - start


@pytest.fixture
def url(backend, tokenizer):
    config = ServerConfig(served_model_name=("tiny",), max_connections=4, **LIMITS)
    with served(create_app(backend, tokenizer, config), config) as url:
        yield url


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"", b"", b""),  # silent from the start
        (b"GET /health HTTP/1.1\r\nHost: loc", b"HTTP/1.1 408", b"head_timeout"),
        (head(len(BODY)) + BODY[:10], b"HTTP/1.1 408", b"body_timeout"),
        (head(len(BODY)).replace(b"Content-Length: 54", b"Transfer-Encoding: chunked") + b"5\r\n{", b"HTTP/1.1 408", b"body_timeout"),
        (HEALTH, b"HTTP/1.1 200", b"ok"),  # then idle
        (HEALTH + HEALTH[:20], b"HTTP/1.1 200", b"ok"),  # then half a head that came ahead
        (head(99, "/no/such/path") + b"half", b"HTTP/1.1 404", b"unknown_url"),  # whose body nobody reads
    ],
)
def test_what_is_not_sent_in_time_is_closed(url, sent, status, code):
    with connected(url, sent) as connection:
        received, seconds = rest(connection)
    assert received.startswith(status) and code in received
    assert 0.25 < seconds < 1.5


@pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\nX-Long: ", head(100_000) + b"{", HEALTH + b"GET /"])
def test_bytes_one_by_one_put_no_limit_off(url, begun):
    with connected(url, begun) as connection:
        assert 0.25 < drip(connection, b"a") < 1.5


def test_a_slow_body_that_goes_on_is_waited_for(url):
    """0.3 s are its time, and a second for each 4 KiB: this one takes 0.8 s."""
    body = BODY[:-1] + b" " * 8192 + b"}"
    with connected(url, head(len(body)), body[:8000]) as connection:
        for _ in range(8):
            time.sleep(0.1)
            connection.sendall(body[8000:][:1])
            body = body[:8000] + body[8001:]
        connection.sendall(body[8000:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_answer_under_way_is_never_cut(url, backend):
    """Nor is one that only begins after all limits have passed."""
    backend.hold.clear()
    with ExitStack() as stack:
        started = [stack.enter_context(connected(url, head(len(body)) + body)) for body in (STREAM, BODY)]
        backend.hold_after = 5
        started += [stack.enter_context(connected(url, head(len(body)) + body)) for body in (STREAM, BODY)]
        time.sleep(1.0)
        with connected(url, head(len(BODY)) + BODY) as refused:
            received, seconds = rest(refused)
        assert received.startswith(b"HTTP/1.1 503") and b"too_many_connections" in received and seconds < 0.5
        with connected(url, HEALTH) as probe:
            assert probe.recv(65536).startswith(b"HTTP/1.1 200"), "what watches over a server always gets in"
        backend.hold.set()
        answers = [rest(connection)[0] for connection in started]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert [b"[DONE]" in answer for answer in answers] == [True, False, True, False]


def test_idle_connections_make_room_for_new_ones(url):
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(url)) for _ in range(12)]
        with connected(url, head(len(BODY)) + BODY) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            silent[0].settimeout(0.1)
            assert rest(silent[0])[1] < 0.1, "the longest idle one"
        for other in silent:
            rest(other)


def test_a_client_that_takes_nothing_is_let_go_and_a_slow_one_is_not(backend, tokenizer):
    config = ServerConfig(**LIMITS)
    app = create_app(backend, tokenizer, config)
    open_streams = []

    @app.get("/long")
    async def long(name: str) -> StreamingResponse:
        async def chunks():
            open_streams.append(name)
            try:
                for _ in range(1000):
                    yield b"x" * 65536
            finally:
                open_streams.remove(name)

        return StreamingResponse(chunks())

    ask = "GET /long?name={} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(app, config) as url, connected(url, ask.format("stuck").encode()), connected(url, ask.format("slow").encode()) as slow:
        for _ in range(30):  # the kernel holds back for longer than the limit before it asks the server for more
            assert slow.recv(20_000)
            time.sleep(0.05)
        assert open_streams == ["slow"]


def test_a_huge_head_is_refused(url):
    with connected(url, b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 100_000) as connection:
        received, seconds = rest(connection)
    assert received.startswith(b"HTTP/1.1 400") or not received  # a reset may overtake it
    assert seconds < 0.25
