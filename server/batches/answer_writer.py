"""Writes answers to the disk: one transaction for all that arrived while the last one was written."""

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
    """Retries until an answer is written: computing it again would cost more."""

    def __init__(self, keep: Callable[[Sequence[Answer]], None]) -> None:
        """`keep` makes answers durable; it blocks."""
        self._keep = keep
        self._waiting: list[tuple[Answer, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def write(self, answer: Answer) -> None:
        """Returns once the answer is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        await done

    async def stop(self) -> None:
        """Writes what is pending; gives up on a disk that fails."""
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
