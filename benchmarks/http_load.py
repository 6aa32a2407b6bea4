"""Requests to an OpenAI-compatible server, timed: one, many at given times (open loop), many at a given concurrency (closed loop).

Every request has a connection of its own: no server closes it just as the next request goes out."""

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
RETRY = 0.5  # seconds that a client of a closed loop waits when it got no answer
QUOTED = 300  # characters of an error's body that a record keeps


class Outcome(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"  # 429 or 503: too much at once
    REJECTED = "rejected"  # another 4xx: the request is wrong
    FAILED = "failed"  # another 5xx, or an error told inside a stream
    BROKEN = "broken"  # the connection ended before the answer did
    LEFT = "left"  # the client went away, as it meant to
    UNFINISHED = "unfinished"  # given up on: the server never answered


@dataclass(slots=True)
class Record:
    """What became of one request. Times are `time.perf_counter`'s seconds; latencies count from when it was due, so that a late
    client's delay isn't hidden."""

    due: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of the events that bring text
    outcome: Outcome = Outcome.UNFINISHED
    status: int = 0  # 0: no HTTP answer
    code: str = ""  # the error's, where the answer is one in OpenAI's form
    message: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # None: the server doesn't tell
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
class Request:
    path: str  # such as /v1/completions
    body: bytes
    leaves_after: int | None = None  # go away after this many events of the stream
    leaves_at: float | None = None  # go away after this many seconds
    sends_half: bool = False  # of the body: the server waits for the rest until the client goes away
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], **keywords: Any) -> Request:
        return cls(path, json.dumps(body).encode(), **keywords)


def base_url(url: str) -> str:
    """Without the /v1 that many clients want at the end."""
    return url.rstrip("/").removesuffix("/v1")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for `send`. The key in the environment's OPENAI_API_KEY is sent where there is one."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(base_url(url), connector=connector, timeout=timeout, headers=headers) as session:
        yield session


async def send(session: aiohttp.ClientSession, request: Request, record: Record | None = None) -> Record:
    """Send it and follow the answer to its end. Raises nothing that the server or the network does: the record tells. Where it is
    cancelled, the record (the caller's, then) stays unfinished."""
    record = record or Record(time.perf_counter())
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(request.leaves_at) as patience:
            await _exchange(session, request, record)
    except Exception as error:  # whatever an answer that is none may cause
        if patience.expired():
            record.outcome = Outcome.LEFT
        else:
            record.outcome, record.message = Outcome.BROKEN, f"{type(error).__name__}: {error}"[:QUOTED]
    finally:
        record.ended = time.perf_counter()
    return record


async def _exchange(session: aiohttp.ClientSession, request: Request, record: Record) -> None:
    headers = dict(request.headers)
    data: bytes | AsyncIterator[bytes] = request.body
    if request.sends_half:
        headers["Content-Length"], data = str(len(request.body)), _half(request.body)
    async with session.post(request.path, data=data, headers=headers) as response:
        record.status = response.status
        if response.status != 200:
            text = await response.text(errors="replace")
            record.outcome, record.message, record.code = _outcome_of(response.status), text[:QUOTED], _code_of(text)
        elif response.content_type == "text/event-stream":
            await _read_stream(response, request.leaves_after, record)
        else:
            answer = await response.json()
            record.arrivals.append(time.perf_counter())
            record.choices = [_text(choice) for choice in answer["choices"]]
            _take_usage(answer.get("usage"), record)
            record.outcome = Outcome.ANSWERED


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    await asyncio.Event().wait()


def _code_of(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return ""


def _outcome_of(status: int) -> Outcome:
    if status in (429, 503):
        return Outcome.REFUSED
    return Outcome.REJECTED if 400 <= status < 500 else Outcome.FAILED


async def _read_stream(response: aiohttp.ClientResponse, leaves_after: int | None, record: Record) -> None:
    texts: dict[int, str] = {}
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now, data = time.perf_counter(), line[5:].strip()
        if data == b"[DONE]":
            record.outcome, record.choices = Outcome.ANSWERED, [texts[i] for i in sorted(texts)]
            return
        event = json.loads(data)
        if "error" in event:
            record.outcome, record.message, record.code = Outcome.FAILED, str(event["error"])[:QUOTED], _code_of(data.decode())
            return
        _take_usage(event.get("usage"), record)
        for choice in event["choices"]:
            text = _text(choice)
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            # A lone end counts only where no text came at all: the one token there was had none.
            if text or (choice.get("finish_reason") and not record.arrivals):
                record.arrivals.append(now)
        if leaves_after is not None and len(record.arrivals) >= leaves_after:
            record.outcome = Outcome.LEFT
            response.close()
            return
    record.outcome, record.message = Outcome.BROKEN, "the stream ended without [DONE]"


def _text(choice: Mapping[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or part.get("content") or ""


def _take_usage(usage: Mapping[str, Any] | None, record: Record) -> None:
    if usage:
        record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def open_loop(
    session: aiohttp.ClientSession, schedule: Iterable[tuple[float, Request]], records: list[Record], patience: float | None = None
) -> None:
    """Send each request at its time (seconds from now, ascending) whatever became of those before it, then wait for all of them:
    `patience` seconds at most, after which the rest stay unfinished. `records` grows by one with each that is sent."""
    start = time.perf_counter()
    tasks: list[asyncio.Task[Record]] = []
    try:
        for at, request in schedule:  # the next request is made before its time has come
            await asyncio.sleep(max(start + at - time.perf_counter(), 0))
            records.append(Record(start + at))
            tasks.append(asyncio.create_task(send(session, request, records[-1])))
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
    finally:
        await _cancel(tasks)


async def closed_loop(
    session: aiohttp.ClientSession,
    requests: Iterator[Request],
    records: list[Record],
    *,
    concurrency: int,
    seconds: float,
    patience: float | None = None,
) -> None:
    """Keep `concurrency` requests under way for that long (or until there are none), then let them end; the rest as `open_loop`."""
    deadline = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < deadline and (request := next(requests, None)) is not None:
            records.append(record := Record(time.perf_counter()))
            await send(session, request, record)
            if record.outcome in (Outcome.REFUSED, Outcome.BROKEN):
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
