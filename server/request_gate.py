"""RequestGate: requests pass one by one; closed, it holds new ones back until those that passed have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestGate:
    """Used by one event loop."""

    def __init__(self) -> None:
        self._is_open, self._is_empty = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_empty.set()
        self._num_inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """A request's time, from when the gate is open."""
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Entered once nobody is inside; nobody gets in before it is left. One at a time."""
        self._is_open.clear()
        try:
            await self._is_empty.wait()
            yield
        finally:
            self._is_open.set()
