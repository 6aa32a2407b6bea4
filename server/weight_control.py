"""EngineWeightControl: the weights of an engine in this process replaced, put to sleep and woken, while requests come
in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from jaxinfer.engine import Engine
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.local_checkpoint import local_checkpoint
from server.backend import InFlight
from server.request_gate import RequestGate

T = TypeVar("T")


class EngineWeightControl:
    """See `WeightControl`."""

    def __init__(self, engine: Engine, engine_loop: EngineLoop, gate: RequestGate) -> None:
        self._engine, self._loop, self._gate = engine, engine_loop, gate
        self._one_at_a_time = asyncio.Lock()

    async def sleep(self, level: int, in_flight: InFlight) -> None:
        """See `Engine.sleep`."""
        await self._call(lambda: self._engine.sleep(level), in_flight)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._call(self._engine.wake, "pause")

    async def update_weights(self, model: str, in_flight: InFlight) -> int:
        """See `Engine.update_weights`; returns the version."""
        path = await asyncio.to_thread(local_checkpoint, model)
        return await self._call(lambda: self._engine.update_weights(path), in_flight)

    async def _call(self, function: Callable[[], T], in_flight: InFlight) -> T:
        async with self._one_at_a_time:
            # Requests that a sleeping engine paused end no sooner than it wakes.
            waits = in_flight == "finish" and not self._engine.stats.is_asleep
            async with self._gate.closed() if waits else nullcontext():
                return await asyncio.to_thread(lambda: self._loop.call(function, is_long=True))
