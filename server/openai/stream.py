"""Streams: server-sent events, merged iterators, and cancellation of both when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from server.openai.errors import from_exception

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499  # nginx's status for it, seen in the metrics only


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; cancels it and raises `ClientGone` if the client disconnects first. The request's body must have
    been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def event_stream(request: Request, chunks: AsyncGenerator[BaseModel]) -> Response:
    """A response that streams `chunks`. Waits for the first, so that an error before it has its own HTTP status."""
    try:
        first = await until_disconnected(request.receive, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return _EventStream(first, chunks)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, first: BaseModel, rest: AsyncGenerator[BaseModel]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            with suppress(ClientGone):
                await until_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def write(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await write(self._first.model_dump_json(exclude_unset=True))
        try:
            async for chunk in self._rest:
                await write(chunk.model_dump_json(exclude_unset=True))
        except Exception as error:  # the status is sent, so the stream has to report it
            await write(json.dumps(from_exception(error).body()))
        else:
            await write("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Every item of every stream as it comes, with the stream's number. An error of one ends all; closing this closes
    all."""
    if len(streams) == 1:  # the usual case needs no tasks
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    arrived.put_nowait((number, item))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            match await arrived.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case number, item:
                    yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
