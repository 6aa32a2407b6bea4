"""Timed requests to an OpenAI-compatible server: one, many at given times (open loop), many at a given concurrency
(closed loop).

Every request has its own connection: no server closes it just as the next request is sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

KEY_VARIABLE = "OPENAI_API_KEY"
RETRY = 0.5  # seconds that a client of a closed loop waits after a request without an answer
QUOTED = 300  # characters of an error's body in a record


class LoadOutcome(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"  # 429 or 503: too much at once
    REJECTED = "rejected"  # another 4xx: the request is wrong
    FAILED = "failed"  # another 5xx, or an error inside a stream
    BROKEN = "broken"  # the connection ended before the answer did
    LEFT = "left"  # the client disconnected, as planned
    UNFINISHED = "unfinished"  # given up: the server never answered


@dataclass(slots=True)
class RequestRecord:
    """The outcome of one request. Times are `time.perf_counter`'s seconds. Latencies count from when it was due, so
    that a late client's delay isn't hidden."""

    due: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of the events that bring text
    outcome: LoadOutcome = LoadOutcome.UNFINISHED
    status: int = 0  # 0: no HTTP answer
    code: str = ""  # the error's, where the answer is one in OpenAI's form
    message: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # None: the server doesn't report it
    choices: list[str] = field(default_factory=list)  # texts of a whole answer, or of a stream

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] - self.due if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def time_per_token(self) -> float | None:
        """Seconds an output token after the first; None where there is no second one."""
        if not self.arrivals or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    path: str  # such as /v1/completions
    body: bytes
    disconnects_after: int | None = None  # disconnect after this many events of the stream
    disconnects_at: float | None = None  # disconnect after this many seconds
    sends_partial_body: bool = False  # the server waits for the rest of the body until the client disconnects
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], **keywords: Any) -> LoadRequest:
        return cls(path, json.dumps(body).encode(), **keywords)


def base_url(url: str) -> str:
    """The URL without the /v1 that many clients expect at the end."""
    return url.rstrip("/").removesuffix("/v1")


@asynccontextmanager
async def open_session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for `send`. It sends the key in the environment's OPENAI_API_KEY where there is one."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(base_url(url), connector=connector, timeout=timeout, headers=headers) as session:
        yield session


async def send(session: aiohttp.ClientSession, request: LoadRequest, record: RequestRecord | None = None) -> RequestRecord:
    """Sends a request and follows the answer to its end. Errors of the server or the network are not raised but
    recorded. Where it is cancelled, the caller's record stays unfinished."""
    record = record or RequestRecord(time.perf_counter())
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(request.disconnects_at) as patience:
            await _exchange(session, request, record)
    except Exception as error:  # whatever an invalid answer may cause
        if patience.expired():
            record.outcome = LoadOutcome.LEFT
        else:
            record.outcome, record.message = LoadOutcome.BROKEN, f"{type(error).__name__}: {error}"[:QUOTED]
    finally:
        record.ended = time.perf_counter()
    return record


async def _exchange(session: aiohttp.ClientSession, request: LoadRequest, record: RequestRecord) -> None:
    headers = dict(request.headers)
    data: bytes | AsyncIterator[bytes] = request.body
    if request.sends_partial_body:
        headers["Content-Length"], data = str(len(request.body)), _half(request.body)
    async with session.post(request.path, data=data, headers=headers) as response:
        record.status = response.status
        if response.status != 200:
            text = await response.text(errors="replace")
            record.outcome, record.message, record.code = _outcome_of(response.status), text[:QUOTED], _code_of(text)
        elif response.content_type == "text/event-stream":
            await _read_stream(response, request.disconnects_after, record)
        else:
            answer = await response.json()
            record.arrivals.append(time.perf_counter())
            record.choices = [_text(choice) for choice in answer["choices"]]
            _take_usage(answer.get("usage"), record)
            record.outcome = LoadOutcome.ANSWERED


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    await asyncio.Event().wait()


def _code_of(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return ""


def _outcome_of(status: int) -> LoadOutcome:
    if status in (429, 503):
        return LoadOutcome.REFUSED
    return LoadOutcome.REJECTED if 400 <= status < 500 else LoadOutcome.FAILED


async def _read_stream(response: aiohttp.ClientResponse, disconnects_after: int | None, record: RequestRecord) -> None:
    texts: dict[int, str] = {}
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now, data = time.perf_counter(), line[5:].strip()
        if data == b"[DONE]":
            record.outcome, record.choices = LoadOutcome.ANSWERED, [texts[i] for i in sorted(texts)]
            return
        event = json.loads(data)
        if "error" in event:
            record.outcome, record.message, record.code = LoadOutcome.FAILED, str(event["error"])[:QUOTED], _code_of(data.decode())
            return
        _take_usage(event.get("usage"), record)
        for choice in event["choices"]:
            text = _text(choice)
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            # An end without text counts only where no text came at all: its one token had none.
            if text or (choice.get("finish_reason") and not record.arrivals):
                record.arrivals.append(now)
        if disconnects_after is not None and len(record.arrivals) >= disconnects_after:
            record.outcome = LoadOutcome.LEFT
            response.close()
            return
    record.outcome, record.message = LoadOutcome.BROKEN, "the stream ended without [DONE]"


def _text(choice: Mapping[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or part.get("content") or ""


def _take_usage(usage: Mapping[str, Any] | None, record: RequestRecord) -> None:
    if usage:
        record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def open_loop(
    session: aiohttp.ClientSession,
    schedule: Iterable[tuple[float, LoadRequest]],
    records: list[RequestRecord],
    patience: float | None = None,
) -> None:
    """Sends each request at its time (seconds from now, ascending) whatever became of those before it, then waits for
    all of them. After `patience` seconds the rest stays unfinished. `records` grows by one with each that is sent."""
    start = time.perf_counter()
    tasks: list[asyncio.Task[RequestRecord]] = []
    try:
        for at, request in schedule:  # the next request is created before its time has come
            await asyncio.sleep(max(start + at - time.perf_counter(), 0))
            records.append(RequestRecord(start + at))
            tasks.append(asyncio.create_task(send(session, request, records[-1])))
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
    finally:
        await _cancel(tasks)


async def closed_loop(
    session: aiohttp.ClientSession,
    requests: Iterator[LoadRequest],
    records: list[RequestRecord],
    *,
    concurrency: int,
    seconds: float,
    patience: float | None = None,
) -> None:
    """Keeps `concurrency` requests active for `seconds` (or until there are none), then lets them end; the rest as in
    `open_loop`."""
    deadline = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < deadline and (request := next(requests, None)) is not None:
            records.append(record := RequestRecord(time.perf_counter()))
            await send(session, request, record)
            if record.outcome in (LoadOutcome.REFUSED, LoadOutcome.BROKEN):
                await asyncio.sleep(RETRY)

    clients = [asyncio.create_task(client()) for _ in range(concurrency)]
    try:
        await asyncio.wait(clients, timeout=None if patience is None else seconds + patience)
    finally:
        await _cancel(clients)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
