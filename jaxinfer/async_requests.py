"""AsyncRequests: asyncio's side of an engine loop, with one wake-up of the event loop for each engine step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from jaxinfer.encode.text_batching import Embedded, TokenIds
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.engine_thread import NewRequest
from jaxinfer.listeners import Event, Failed
from jaxinfer.request import OutputDelta


class AsyncRequests:
    """Belongs to the event loop that it is made in. Only `deliver` is called from the engine's thread."""

    def __init__(self, engine_loop: EngineLoop) -> None:
        self._engine_loop = engine_loop
        self.event_loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Queue[Event]] = {}  # by request id

    async def stream(self, request: NewRequest) -> AsyncGenerator[OutputDelta]:
        """A request's deltas. Raises what `EngineLoop.submit` raises, or the request's error. Closing it early, or
        cancelling the task that iterates, aborts the request."""
        events = self._expect(request.request_id)
        num_unfinished = request.params.n
        try:
            self._engine_loop.submit([request], self)
            while num_unfinished:
                event = await events.get()
                if isinstance(event, Failed):
                    num_unfinished = 0
                    raise event.error
                assert isinstance(event, OutputDelta)
                num_unfinished -= event.finish_reason is not None
                yield event
        finally:
            del self._waiting[request.request_id]
            if num_unfinished:
                self._engine_loop.abort([request.request_id])

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds]) -> Embedded:
        """Embeddings of texts as token ids (see `encode.reader`). Raises as `stream` does; cancelling the task drops
        the request."""
        events = self._expect(request_id)
        try:
            self._engine_loop.embed(request_id, token_lists, self)
            event = await events.get()
            if isinstance(event, Failed):
                raise event.error
            assert isinstance(event, Embedded)
            return event
        except BaseException:
            self._engine_loop.abort([request_id])
            raise
        finally:
            del self._waiting[request_id]

    def _expect(self, request_id: str) -> asyncio.Queue[Event]:
        assert request_id not in self._waiting, "request ids are unique"
        events = self._waiting[request_id] = asyncio.Queue()
        return events

    def deliver(self, events: list[Event]) -> None:
        """See `Listener`."""
        try:
            self.event_loop.call_soon_threadsafe(self._sort, events)
        except RuntimeError:  # the event loop is closed, so nobody waits
            self._engine_loop.abort([event.request_id for event in events])

    def _sort(self, events: list[Event]) -> None:
        for event in events:
            if (waiting := self._waiting.get(event.request_id)) is not None:  # None: abandoned during the step
                waiting.put_nowait(event)
