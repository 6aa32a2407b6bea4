"""Runs batches through their states, from wherever they were when the server ended or was killed."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.backend import Backend, Unavailable
from server.batches.answer_writer import AnswerWriter
from server.batches.batch_admission import BatchAdmission, Permit
from server.batches.batch_store import Answer, BatchStore, StoredBatch, answer_id
from server.batches.database import in_thread
from server.batches.lines import BatchLine, answer_line, encoded_beside, is_failure, no_answer, read_line, request_id
from server.batches.validation import LinePlace
from server.logs import LoggedRequest, current_request
from server.openai.caller import Caller
from server.openai.errors import ApiError
from server.openai.service import Service

logger = logging.getLogger(__name__)

PRIORITY = 20  # after interactive requests (0) and those of the flex tier (10)
LOOK_SECONDS = 5.0  # between two checks for expired batches and files
RETRY_SECONDS = 1.0  # after the backend aborted a line


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Lines answered by this process, in full or with an error, and those that batches in progress still wait for."""

    num_completed: int
    num_failed: int
    num_waiting: int


class BatchRunner:
    """The store is authoritative, also for cancelled batches; `look` notifies the runner of changes there."""

    def __init__(self, service: Service, store: BatchStore, may_ask: Callable[[], bool], backend: Backend | None = None) -> None:
        """`may_ask`: whether lines may be run now. `backend`: all that runs beside them, where that is more than the
        service's."""
        self._service, self._store = service, store
        self._admission = BatchAdmission(backend or service.backend, may_ask)
        self._writer = AnswerWriter(store.keep)
        self._tasks: list[asyncio.Task[None]] = []
        self._lives: dict[str, asyncio.Task[None]] = {}  # of each open batch
        self._answering: dict[str, asyncio.Task[None]] = {}  # of each batch in progress
        self._num_left: dict[str, int] = {}  # lines without an answer
        self._num_answered = {False: 0, True: 0}  # by whether with an error
        self._is_new = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()  # reading a file, or writing one

    def counts(self) -> BatchCounts:
        """For the metrics."""
        return BatchCounts(self._num_answered[False], self._num_answered[True], sum(self._num_left.values()))

    def start(self) -> None:
        """Starts all open batches."""
        self._tasks = [asyncio.create_task(self._admission.run()), asyncio.create_task(self._run())]

    async def stop(self) -> None:
        """Aborts running lines: the next start runs them again. The store is not used any more after this."""
        await _end(*self._tasks)  # first, because they start lives
        await _end(*self._lives.values())
        await self._writer.stop()

    def look(self) -> None:
        """A batch was created or cancelled."""
        self._is_new.set()

    async def _run(self) -> None:
        while True:
            self._is_new.clear()
            try:
                for batch in await in_thread(self._store.open_batches):
                    self._look_at(batch)
                await in_thread(self._store.files.remove_expired)
            except (sqlite3.Error, OSError):
                logger.exception("the batches can't be read; trying again in %g s", LOOK_SECONDS)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_new.wait(), LOOK_SECONDS)

    def _look_at(self, batch: StoredBatch) -> None:
        if batch.id not in self._lives:
            life = self._lives[batch.id] = asyncio.create_task(self._live(batch.id))
            life.add_done_callback(lambda _: self._lives.pop(batch.id))
        elif batch.id in self._answering and (batch.status == "cancelling" or self._is_over(batch)):
            self._answering[batch.id].cancel()

    def _is_over(self, batch: StoredBatch) -> bool:
        return batch.expires_at <= self._store.now()

    async def _live(self, id: str) -> None:
        """Runs a batch from its current state to its end."""
        try:
            batch = await in_thread(self._store.read, id)
            if batch.status == "validating":
                async with self._one_at_a_time:
                    config = self._service.config
                    validate = partial(self._store.validate, is_strict=config.strict_parameters)
                    batch = await in_thread(validate, batch, config.max_body_bytes)
            if batch.status == "in_progress" and not self._is_over(batch):
                await self._answer_until_ended(batch)
            async with self._one_at_a_time:
                await in_thread(self._store.finish, id)
        except Exception:
            logger.exception("batch %s can't go on; trying again in %g s", id, LOOK_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)  # the next check restarts it

    async def _answer_until_ended(self, batch: StoredBatch) -> None:
        """Returns when every line has its answer, or when the batch was cancelled or has expired."""
        answering = self._answering[batch.id] = asyncio.create_task(self._answer_all(batch))
        self._num_left[batch.id] = batch.num_lines - batch.num_completed - batch.num_failed
        try:
            await asyncio.wait([answering])
            if not answering.cancelled():  # by `_look_at`
                answering.result()
        finally:
            await _end(answering)
            del self._answering[batch.id], self._num_left[batch.id]

    async def _answer_all(self, batch: StoredBatch) -> None:
        """Runs every line that has no answer. When cancelled, it aborts running ones."""
        async with asyncio.TaskGroup() as group:
            async for place in self._unanswered(batch):
                custom_id, line = read_line(
                    await in_thread(self._store.request, batch, place), is_strict=self._service.config.strict_parameters
                )
                taken = await self._admission.enter(line) if isinstance(line, BatchLine) else None
                task = group.create_task(self._answer(batch, place.number, custom_id, line))
                if taken is not None:  # not within the task, which may be cancelled before it begins
                    task.add_done_callback(partial(self._leave, taken))

    def _leave(self, taken: Permit, _: asyncio.Task[None]) -> None:
        self._admission.leave(taken)

    async def _unanswered(self, batch: StoredBatch) -> AsyncIterator[LinePlace]:
        number = 0
        while places := await in_thread(self._store.unanswered, batch, number):
            for place in places:
                yield place
            number = places[-1].number

    async def _answer(self, batch: StoredBatch, number: int, custom_id: str | None, line: BatchLine | ApiError) -> None:
        """Returns once the answer is on the disk."""
        id = answer_id(batch.id, number)
        # No server timeout: a line may wait for admission as long as its batch.
        current_request.set(LoggedRequest(request_id(id), batch.tenant))
        caller = Caller(tenant=batch.tenant, request_id=request_id(id), priority=PRIORITY)
        while True:
            try:
                answer = await answer_line(self._service, id, custom_id, line, caller)
                break
            except Unavailable:  # no answer: run again when the backend serves again, maybe after the next start
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # a fault of this program: other lines must not run into it again and again
                logger.exception("line %d of batch %s can't be answered", number, batch.id)
                answer = no_answer(id, custom_id, "internal_error", "internal error; the server's log has the details")
                break
        await self._writer.write(_count(batch, number, answer, await encoded_beside(answer)))
        self._num_answered[is_failure(answer)] += 1
        self._num_left[batch.id] -= 1


def _count(batch: StoredBatch, number: int, answer: dict[str, Any], line: bytes) -> Answer:
    if is_failure(answer):
        return Answer(batch.id, number, line, is_failure=True)
    usage = answer["response"]["body"]["usage"]  # embeddings have prompts only
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return Answer(batch.id, number, line, False, usage["prompt_tokens"], cached, usage.get("completion_tokens", 0))


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
