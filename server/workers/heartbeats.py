"""Signs of life in a call whose next event may be long in coming: a stopped process breaks no connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import grpc.aio

from server.workers import worker_pb2 as pb


async def with_heartbeats(events: AsyncGenerator[pb.PrefillEvent], seconds: float) -> AsyncGenerator[pb.PrefillEvent]:
    """The events, with an empty one whenever there is none for so many seconds."""
    coming: asyncio.Future[pb.PrefillEvent] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            await asyncio.wait((coming,), timeout=seconds)
            if not coming.done():
                yield pb.PrefillEvent()
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield event
    finally:
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await coming
        await events.aclose()


async def until_silent(
    call: grpc.aio.UnaryStreamCall[pb.PrefillRequest, pb.PrefillEvent], seconds: float
) -> AsyncIterator[pb.PrefillEvent]:
    """The events of a call. Raises `TimeoutError`, and ends the call, where none comes for so many seconds."""
    events = call.__aiter__()
    try:
        while True:
            try:
                yield await asyncio.wait_for(anext(events), seconds)
            except StopAsyncIteration:
                return
    finally:
        call.cancel()
