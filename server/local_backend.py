"""LocalBackend: an engine in this process, stepping in a thread of its own while asyncio serves."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from jaxinfer.encode.texts import Embedded, TokenIds
from jaxinfer.engine import Engine
from jaxinfer.request import ANYONE, OutputDelta, RequestContext, RequestError, SamplingParams
from jaxinfer.stats import EngineStats
from server.admission import Admissions
from server.backend import Overloaded, Unavailable

logger = logging.getLogger(__name__)

SHORTEST_RETRY, LONGEST_RETRY = 1.0, 120.0  # seconds
MOST_TEXTS = 16_384  # to embed at once: the engine's thread goes through all that wait for each of their batches, 2 ms of that many
JOIN_TIMEOUT = 30.0  # seconds that the engine's thread gets to end its last step and to save what it keeps


@dataclass(frozen=True, slots=True)
class _Add:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    context: RequestContext


@dataclass(frozen=True, slots=True)
class _Embed:
    request_id: str
    token_lists: Sequence[TokenIds]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class LocalBackend:
    """The engine is touched by its thread alone; requests and aborts reach it through one queue, and each step's deltas come
    back in one wake-up of the event loop. All other state belongs to the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.max_model_len = engine.max_model_len
        self.max_batch_size = engine.config.schedule.max_batch_size
        self._encode = engine.encode
        self.text_reader = None if self._encode is None else self._encode.reader
        self._inbox: queue.SimpleQueue[_Add | _Embed | _Abort | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[OutputDelta | Exception]] = {}
        self._unserved: dict[str, int] = {}  # the priorities of requests that have had nothing yet, by request id
        self._num_unseen = 0  # requests sent that the engine's gauges don't count yet
        self._admissions = Admissions()
        self._embeddings: dict[str, asyncio.Future[Embedded]] = {}
        self._num_texts = 0  # of these requests
        self._embedding_pace = Admissions()
        self._failure: str | None = None
        self._is_stopping = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._thread: threading.Thread | None = None

    def stats(self) -> EngineStats:
        """The engine's own, live."""
        return self._engine.stats

    def is_ready(self) -> bool:
        return self._thread is not None and not self._is_stopping and self._failure is None

    def failure(self) -> str | None:
        return self._failure

    async def start(self) -> None:
        """Start the engine's thread."""
        assert self._thread is None, "a LocalBackend starts once"
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Refuse new requests, finish those under way, then close the engine and end its thread."""
        self._is_stopping = True
        await self._quiet.wait()
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, context: RequestContext = ANYONE
    ) -> AsyncGenerator[OutputDelta]:
        """See `Backend`."""
        if not self.is_ready():
            raise Unavailable(self._failure or "the server is shutting down")
        self._engine.validate(prompt_token_ids, params)
        self._check_room(context.priority)
        assert request_id not in self._streams, "request ids are unique"
        stream = self._streams[request_id] = asyncio.Queue()
        self._quiet.clear()
        self._num_unseen += 1
        self._inbox.put(_Add(request_id, tuple(prompt_token_ids), params, context))
        self._admissions.wait(time.monotonic())
        self._unserved[request_id] = context.priority
        num_unfinished, is_admitted = params.n, False
        try:
            while num_unfinished:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                if not is_admitted:
                    is_admitted = True
                    del self._unserved[request_id]
                    self._admissions.admit(time.monotonic())
                num_unfinished -= item.finish_reason is not None
                yield item
        finally:
            del self._streams[request_id]
            if not is_admitted:
                del self._unserved[request_id]
                self._admissions.leave(time.monotonic())
            if num_unfinished:
                self._inbox.put(_Abort(request_id))
            self._rest()

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds]) -> Embedded:
        """See `Backend`."""
        if not self.is_ready():
            raise Unavailable(self._failure or "the server is shutting down")
        is_full = len(self._embeddings) >= self._engine.config.schedule.max_queue_size
        if is_full or self._num_texts + len(token_lists) > MOST_TEXTS:
            raise self._overloaded(self._embedding_pace)
        assert request_id not in self._embeddings, "request ids are unique"
        done = self._embeddings[request_id] = asyncio.get_running_loop().create_future()
        self._num_texts += len(token_lists)
        self._quiet.clear()
        self._inbox.put(_Embed(request_id, token_lists))
        self._embedding_pace.wait(time.monotonic())
        try:
            embedded = await done
            self._embedding_pace.admit(time.monotonic())
            return embedded
        except BaseException:
            self._embedding_pace.leave(time.monotonic())
            self._inbox.put(_Abort(request_id))
            raise
        finally:
            del self._embeddings[request_id]
            self._num_texts -= len(token_lists)
            self._rest()

    def _rest(self) -> None:
        if not self._streams and not self._embeddings:
            self._quiet.set()

    def _overloaded(self, pace: Admissions) -> Overloaded:
        return Overloaded(min(max(pace.seconds_until_admitted(time.monotonic()), SHORTEST_RETRY), LONGEST_RETRY))

    def _check_room(self, priority: int) -> None:
        """A request has the whole queue for it and what is as urgent: less urgent work that waits does not keep it out. For all together
        there is room for twice as many, or every priority would have memory of its own."""
        num_waiting = self._engine.stats.num_waiting + self._num_unseen
        num_ahead = min(num_waiting, sum(of_other <= priority for of_other in self._unserved.values()))
        most = self._engine.config.schedule.max_queue_size
        if num_ahead >= most or num_waiting >= 2 * most:
            raise self._overloaded(self._admissions)

    # The engine's thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                num_added, is_last = self._take_commands(loop)
                if is_last:
                    self._engine.close()
                    return
                deltas = self._engine.step() if self._engine.has_work else []
                embedded = self._step_encoder()
                if deltas or num_added or embedded:
                    loop.call_soon_threadsafe(self._deliver, deltas, num_added, embedded)
        except Exception as error:
            logger.critical("the engine failed; nothing is served until a restart", exc_info=error)
            loop.call_soon_threadsafe(self._fail, error)

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work or (self._encode is not None and self._encode.has_work)

    def _step_encoder(self) -> list[Embedded]:
        """One batch of texts for each step of the engine."""
        if self._encode is None or not self._encode.has_work:
            return []
        is_alone = not self._engine.has_work
        # On one mesh the batch ends before the engine's last step does: reading it costs no time, and tells theirs.
        return self._encode.step(wait=is_alone or self._engine.shares_mesh, most_in_flight=2 if is_alone else 1)

    def _take_commands(self, loop: asyncio.AbstractEventLoop) -> tuple[int, bool]:
        """Hand the engine all that has come in; with nothing to do, wait for it. Returns how many requests there were, and
        whether to end."""
        num_added = 0
        while True:
            try:
                command = self._inbox.get(block=not num_added and not self._has_work)
            except queue.Empty:
                return num_added, False
            match command:
                case None:
                    return num_added, True
                case _Abort(request_id):
                    if self._encode is None or not self._encode.abort(request_id):
                        self._engine.abort(request_id)
                case _Embed(request_id, token_lists):
                    assert self._encode is not None
                    self._encode.add(request_id, token_lists)
                case _Add(request_id, prompt, params, context):
                    num_added += 1
                    try:
                        self._engine.add_request(request_id, prompt, params, context)
                    except RequestError as error:
                        loop.call_soon_threadsafe(self._refuse, request_id, error)

    # On the event loop, called from the engine's thread

    def _deliver(self, deltas: list[OutputDelta], num_added: int, embedded: list[Embedded]) -> None:
        self._num_unseen -= num_added
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:  # else aborted while the step ran
                stream.put_nowait(delta)
        for done in embedded:
            if (waiter := self._embeddings.get(done.request_id)) is not None and not waiter.done():
                waiter.set_result(done)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.put_nowait(error)

    def _fail(self, error: Exception) -> None:
        self._failure = f"the engine failed ({type(error).__name__}: {error}); restart the server"
        for stream in self._streams.values():
            stream.put_nowait(Unavailable(self._failure))
        for waiter in self._embeddings.values():
            if not waiter.done():
                waiter.set_exception(Unavailable(self._failure))
