"""A router's sequences on a worker, all over one call. What comes at about the same time, such as a step's tokens, is
one message: one for each token of each sequence would cost more than the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from server.workers import messages
from server.workers import worker_pb2 as pb

Generate = Callable[[pb.GenerateRequest], AsyncGenerator[pb.Delta]]


class WorkerLost(Exception):
    """A worker ended, or fell silent, before it had answered."""


class _Outgoing:
    """What is to be sent, until the next message takes all of it."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._has_some = asyncio.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._has_some.set()

    async def take(self) -> list[Any]:
        """All, once there is any."""
        await self._has_some.wait()
        self._has_some.clear()
        items, self._items = self._items, []
        return items


async def serve_generate(requests: AsyncIterator[pb.GenerateRequests], generate: Generate) -> AsyncGenerator[pb.GenerateEvents]:
    """The worker's side: `generate` for each sequence that is asked for, at once, until it is cancelled."""
    outgoing, tasks = _Outgoing(), dict[str, asyncio.Task[None]]()

    async def answer(request: pb.GenerateRequest) -> None:
        try:
            async with aclosing(generate(request)) as deltas:
                async for delta in deltas:
                    outgoing.put(pb.GenerateEvent(request_id=request.request_id, delta=delta))
        except Exception as error:
            if messages.is_refusal(error):
                outgoing.put(pb.GenerateEvent(request_id=request.request_id, refused=messages.refusal_text(error)))
            else:
                outgoing.put(pb.GenerateEvent(request_id=request.request_id, failed=f"{type(error).__name__}: {error}"))
        finally:
            tasks.pop(request.request_id, None)

    async def listen() -> None:
        async for message in requests:
            for request in message.generate:
                tasks[request.request_id] = asyncio.create_task(answer(request))
            for request_id in message.cancel:
                if (task := tasks.get(request_id)) is not None:
                    task.cancel()

    listening = asyncio.create_task(listen())
    try:
        while True:
            yield pb.GenerateEvents(events=await outgoing.take())
    finally:
        listening.cancel()
        for task in list(tasks.values()):
            task.cancel()


class GenerateStream:
    """The router's side of one worker. Belongs to the event loop."""

    def __init__(self, work: Callable[[AsyncIterator[pb.GenerateRequests]], Any]) -> None:
        self._outgoing = _Outgoing()
        self._answers: dict[str, asyncio.Queue[pb.GenerateEvent]] = {}
        self._lost: str | None = None
        self._call = work(self._requests())
        self._reading = asyncio.create_task(self._read())

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Delta]:
        """A sequence's deltas. Raises `RequestError` for what no worker would answer, `WorkerLost`."""
        if self._lost is not None:
            raise WorkerLost(self._lost)
        answers = self._answers[request.request_id] = asyncio.Queue()
        self._outgoing.put(request)
        has_ended = False
        try:
            while not has_ended:
                event = await answers.get()
                has_ended = not event.HasField("delta") or event.delta.HasField("finish_reason")
                if event.HasField("refused"):
                    raise messages.read_refusal(event.refused)
                if not event.HasField("delta"):
                    raise WorkerLost(event.failed)
                yield event.delta
        finally:
            del self._answers[request.request_id]
            if not has_ended:
                self._outgoing.put(request.request_id)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def until_lost(self) -> str:
        """Returns why."""
        await asyncio.wait([self._reading])
        return self._lost or "it was closed"

    def close(self, reason: str) -> None:
        """Whoever waits for an answer gets `WorkerLost`."""
        self._lose(reason)
        self._reading.cancel()
        self._call.cancel()

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        for answers in self._answers.values():
            answers.put_nowait(pb.GenerateEvent(failed=self._lost))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                for event in message.events:
                    if (answers := self._answers.get(event.request_id)) is not None:
                        answers.put_nowait(event)
            self._lose("it ended")
        except grpc.aio.AioRpcError as error:
            self._lose(f"{error.code().name}: {error.details()}")

    async def _requests(self) -> AsyncIterator[pb.GenerateRequests]:
        while True:
            items = await self._outgoing.take()
            yield pb.GenerateRequests(
                generate=[item for item in items if not isinstance(item, str)], cancel=[item for item in items if isinstance(item, str)]
            )
