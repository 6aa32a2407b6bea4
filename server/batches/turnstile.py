"""When a batch's line may go to the engine: in the room that interactive requests leave."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from server.backend import Backend
from server.batches.lines import BatchLine

POLL_SECONDS = 0.02  # between two looks at the engine while lines wait


@dataclass(frozen=True, slots=True)
class Pass:
    """What a line takes up; to be given back with `leave`."""

    num_sequences: int
    num_requests: int


class Turnstile:
    """Lets lines in one after another, in the order in which they come: batches that each have one line here take turns.

    Of the decode batch an eighth stays free, so that an interactive request finds a place at once, and only a few lines wait in
    the engine's queue, which is thus never filled by them."""

    def __init__(self, backend: Backend, is_open: Callable[[], bool]) -> None:
        self._backend, self._is_open = backend, is_open
        self._most_sequences = backend.max_batch_size - backend.max_batch_size // 8
        self._most_waiting = max(2, backend.max_batch_size // 16)
        self._entering: deque[tuple[Pass, asyncio.Future[None]]] = deque()
        self._changed = asyncio.Event()
        self._num_inside = 0  # sequences
        self._num_unseen = 0  # requests let in that the engine's gauges may not count yet,
        self._num_counted = 0  # and the engine's count of requests by then

    async def enter(self, line: BatchLine) -> Pass:
        """Return once the line may be asked."""
        wanted = Pass(line.num_sequences, line.num_prompts)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._entering.append((wanted, admitted))
        self._changed.set()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # let in, and cancelled before it knew
                self.leave(wanted)
            raise
        return wanted

    def leave(self, taken: Pass) -> None:
        """A line is done with."""
        self._num_inside -= taken.num_sequences
        self._changed.set()

    async def run(self) -> None:
        """Let lines in, until cancelled."""
        while True:
            self._changed.clear()
            self._admit()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS if self._entering else None)

    def _admit(self) -> None:
        self._num_unseen = self._still_unseen()
        self._num_counted = self._backend.stats().num_requests
        while self._entering:
            wanted, admitted = self._entering[0]
            if not admitted.cancelled():
                if not self._has_room(wanted):
                    return
                self._num_inside += wanted.num_sequences
                self._num_unseen += wanted.num_requests
                admitted.set_result(None)
            self._entering.popleft()

    def _still_unseen(self) -> int:
        """At most those inside: a line with an error never reaches the engine."""
        num_arrived = self._backend.stats().num_requests - self._num_counted
        return min(max(self._num_unseen - num_arrived, 0), self._num_inside)

    def _has_room(self, wanted: Pass) -> bool:
        if not self._is_open():
            return False
        stats = self._backend.stats()
        num_waiting = stats.num_waiting + self._num_unseen
        num_sequences = max(stats.num_running + stats.num_prefilling + num_waiting, self._num_inside)
        num_wanted = min(wanted.num_sequences, (self._most_sequences + 1) // 2)  # a line of very many needs only half of it free
        return num_waiting < self._most_waiting and num_sequences + num_wanted <= self._most_sequences
