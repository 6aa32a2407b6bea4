"""Admission of a batch's lines to the engine: they use the capacity that interactive requests leave."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from server.backend import Backend
from server.batches.lines import BatchLine

# with the embedding model, which runs between requests; 2,048 texts each of the 16,384 that may wait
MAX_EMBEDDING_LINES = 4
POLL_SECONDS = 0.02  # between two polls of the engine while lines wait


@dataclass(frozen=True, slots=True)
class Permit:
    """What a line occupies; to be returned with `leave`."""

    num_sequences: int
    num_requests: int
    is_embedding: bool = False


class BatchAdmission:
    """Admits lines one after another, in the order of arrival: batches that each have one line waiting alternate.

    An eighth of the decode batch stays free, so that an interactive request finds a slot at once. Only a few lines wait
    in the engine's queue, so they never fill it.
    """

    def __init__(self, backend: Backend, is_open: Callable[[], bool]) -> None:
        self._backend, self._is_open = backend, is_open
        self._most_sequences = backend.max_batch_size - backend.max_batch_size // 8
        self._most_waiting = max(2, backend.max_batch_size // 16)
        self._entering: deque[tuple[Permit, asyncio.Future[None]]] = deque()
        self._changed = asyncio.Event()
        self._num_inside = 0  # sequences
        self._num_embedding_lines = 0  # admitted
        self._num_unseen = 0  # admitted requests that the engine's gauges may not count yet,
        self._num_counted = 0  # and the engine's count of requests by then

    async def enter(self, line: BatchLine) -> Permit:
        """Returns once the line is admitted."""
        wanted = Permit(0, 0, is_embedding=True) if line.is_embedding else Permit(line.num_sequences, line.num_prompts)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._entering.append((wanted, admitted))
        self._changed.set()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # admitted, and cancelled before it knew
                self.leave(wanted)
            raise
        return wanted

    def leave(self, taken: Permit) -> None:
        """A line has ended."""
        self._num_inside -= taken.num_sequences
        self._num_embedding_lines -= taken.is_embedding
        self._changed.set()

    async def run(self) -> None:
        """Admits lines, until cancelled."""
        while True:
            self._changed.clear()
            self._admit()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS if self._entering else None)

    def _admit(self) -> None:
        self._num_unseen = self._still_unseen()
        self._num_counted = self._backend.stats().num_requests
        entering, self._entering = self._entering, deque()
        is_blocked = {False: False, True: False}  # by whether for embeddings, which don't wait behind others
        for wanted, admitted in entering:
            if admitted.cancelled():
                continue
            if is_blocked[wanted.is_embedding] or not self._has_room(wanted):
                is_blocked[wanted.is_embedding] = True
                self._entering.append((wanted, admitted))
                continue
            self._num_inside += wanted.num_sequences
            self._num_unseen += wanted.num_requests
            self._num_embedding_lines += wanted.is_embedding
            admitted.set_result(None)

    def _still_unseen(self) -> int:
        """At most those admitted: a line with an error never reaches the engine."""
        num_arrived = self._backend.stats().num_requests - self._num_counted
        return min(max(self._num_unseen - num_arrived, 0), self._num_inside)

    def _has_room(self, wanted: Permit) -> bool:
        if not self._is_open():
            return False
        if wanted.is_embedding:
            return self._num_embedding_lines < MAX_EMBEDDING_LINES
        stats = self._backend.stats()
        num_waiting = stats.num_waiting + self._num_unseen
        num_sequences = max(stats.num_running + stats.num_prefilling + num_waiting, self._num_inside)
        # a line of very many needs only half of it free
        num_wanted = min(wanted.num_sequences, (self._most_sequences + 1) // 2)
        return num_waiting < self._most_waiting and num_sequences + num_wanted <= self._most_sequences
