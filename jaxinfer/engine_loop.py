"""EngineLoop: requests from any thread to an engine that only one thread uses."""

from __future__ import annotations

import atexit
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from jaxinfer.encode.text_batching import TokenIds
from jaxinfer.engine_access import EngineClosedError
from jaxinfer.engine_thread import (
    AbortRequests,
    AddRequests,
    Drivable,
    EmbedTexts,
    EngineCommand,
    EngineFailedError,
    EngineThread,
    Heartbeat,
    NewRequest,
    RunFunction,
    StopThread,
    run,
)
from jaxinfer.listeners import Answers, Failed, Listener
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.request import OutputDelta

logger = logging.getLogger(__name__)

T = TypeVar("T")

_EXIT_SECONDS = 10.0  # for a step in flight when the interpreter exits


class EngineLoop:
    """Runs an engine in a thread and delivers its deltas to listeners; `LLM`, `AsyncLLM` and `LocalBackend` are built
    on it. While it has requests, no other thread may use the engine. Any thread may call methods; they take no lock and
    return at once unless they say that they wait.

    The thread is a daemon. It ends with `close`, with the interpreter, and when the loop is garbage collected.
    """

    def __init__(self, engine: Drivable) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[EngineCommand] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._inner = EngineThread(engine, self._inbox)
        self._thread = threading.Thread(target=run, args=(self._inbox, weakref.ref(self._inner)), name="engine", daemon=True)
        self._thread.start()
        engine.on_process_loss(partial(_lose_by, weakref.ref(self._inner)))
        # atexit runs in reverse order, so this runs before the engine's and JAX's handlers: no step may be in flight
        # then.
        at_exit = partial(_stop_at_exit, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, _let_go, self._inbox, at_exit).atexit = False

    @property
    def heartbeat(self) -> Heartbeat:
        return self._inner.heartbeat

    @property
    def num_unseen(self) -> int:
        """Submitted requests that the engine's gauges don't include yet."""
        return len(self._inner.unseen)

    @property
    def failure(self) -> BaseException | None:
        """The engine's error, after which it serves nothing; None while it works."""
        return self._inner.failure

    def new_id(self) -> str:
        """A new, unique request id."""
        return f"request-{next(self._ids)}"

    def check(self) -> None:
        """Raise `EngineClosedError` or `EngineFailedError` if no request is taken any more."""
        self._engine.access.check()  # first: a forked process must touch nothing else
        if self._inner.has_ended:
            raise self._inner.refusal()

    def submit(self, requests: Sequence[NewRequest], listener: Listener) -> None:
        """Start requests. The listener gets deltas until each of the n sequences has a finish_reason, or `Failed` for a
        request that can't be served. Raises as `check` does."""
        self.check()
        self._inner.unseen.update([request.request_id for request in requests])
        self._send(AddRequests(requests, listener))

    def stream(self, request: NewRequest) -> Generator[OutputDelta]:
        """Start a request when the first delta is requested, and wait for each delta. Closing the generator early
        aborts the request. Raises as `check` does, or the request's error."""
        answers = Answers()
        num_unfinished = request.params.n
        try:
            self.submit([request], answers)
            while num_unfinished:
                for event in answers.get():
                    if isinstance(event, Failed):
                        raise event.error
                    assert isinstance(event, OutputDelta)
                    num_unfinished -= event.finish_reason is not None
                    yield event
        finally:
            if num_unfinished:
                self.abort([request.request_id], wait=True)

    def embed(self, request_id: str, token_lists: Sequence[TokenIds], listener: Listener) -> None:
        """Embed texts as token ids (see `encode.reader`). The listener gets `Embedded` or `Failed`. Raises as `check`
        does."""
        self.check()
        self._send(EmbedTexts(request_id, token_lists, listener))

    def abort(self, request_ids: Iterable[str], *, wait: bool = False) -> None:
        """Abort generation or embedding requests after the current step; `wait` for that step's end. Unknown ids are
        ignored."""
        if not self._engine.access.is_forked:
            self._send(AbortRequests(frozenset(request_ids)))
            if wait and threading.current_thread() is not self._thread:  # that thread may collect a stream too
                with suppress(EngineClosedError, EngineFailedError):
                    self.call(lambda: None)

    def call(self, function: Callable[[], T], *, is_long: bool = False) -> T:
        """Run a function in the engine's thread between two steps; returns its result. Raises what it raises, or as
        `check` does. `is_long`: it may take minutes, and `heartbeat` is not to tell of an engine that hangs."""
        self.check()
        result: Future[T] = Future()
        self._send(RunFunction(function, result, is_long))
        try:
            return result.result()
        except BaseException:
            result.cancel()  # the wait was interrupted
            raise

    def close(self, timeout: float | None = None) -> None:
        """End unfinished requests with `EngineClosedError`, close the engine, and wait up to `timeout` seconds for the
        thread's end. A second call does nothing, nor does one in a forked process."""
        self._stop(StopThread(closes_engine=True), timeout)
        if self._inner.failure is not None and not self._engine.access.is_closed:
            try:
                self._engine.close()
            except Exception as error:
                logger.warning("the engine that failed could not be closed: %s: %s", type(error).__name__, error)

    def exit(self) -> None:
        """End the thread at interpreter exit. Waiting threads are daemons, which end too, so they get no event."""
        self._stop(StopThread(tells_waiting=False), _EXIT_SECONDS)

    def _stop(self, command: StopThread, timeout: float | None) -> None:
        if not self._engine.access.is_forked:
            self._send(command)
            self._thread.join(timeout)

    def _send(self, command: EngineCommand) -> None:
        self._inbox.put(command)
        if self._inner.has_ended:  # the thread may have emptied the inbox for the last time already
            self._inner.refuse_rest()


def _lose_by(thread_of: weakref.ref[EngineThread], error: ProcessLostError) -> None:
    if (thread := thread_of()) is not None:
        thread.lose(error)


def _stop_at_exit(loop_of: weakref.ref[EngineLoop]) -> None:
    if (loop := loop_of()) is not None:
        loop.exit()


def _let_go(inbox: queue.SimpleQueue[EngineCommand], at_exit: Callable[[], None]) -> None:
    inbox.put(StopThread())
    atexit.unregister(at_exit)
