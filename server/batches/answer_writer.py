"""Answers onto the disk: one transaction for all that came while the last one was written."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence

from server.batches.batch_store import Answer
from server.batches.database import in_thread

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # after a failure, such as of a full disk


class AnswerWriter:
    """An answer that can't be written is not given up: it took work, and asking for it again would take more."""

    def __init__(self, keep: Callable[[Sequence[Answer]], None]) -> None:
        """`keep` makes answers durable; it blocks."""
        self._keep = keep
        self._waiting: list[tuple[Answer, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def write(self, answer: Answer) -> None:
        """Return once the answer is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        await done

    async def stop(self) -> None:
        """Write what is still to be written; on a disk that fails, give it up."""
        self._is_stopping = True
        if self._writing is not None:
            await self._writing

    async def _write_all(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            if await self._try([answer for answer, _ in taken]):
                for _, done in taken:
                    if not done.done():  # its caller may have been cancelled
                        done.set_result(None)

    async def _try(self, answers: Sequence[Answer]) -> bool:
        while True:
            try:
                await in_thread(self._keep, answers)
                return True
            except (sqlite3.Error, OSError):
                logger.exception("%d batch answers can't be stored; trying again in %g s", len(answers), RETRY_SECONDS)
                if self._is_stopping:
                    return False
                await asyncio.sleep(RETRY_SECONDS)
