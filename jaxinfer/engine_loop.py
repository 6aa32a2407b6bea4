"""EngineLoop: requests of any thread for an engine that one thread alone touches."""

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
    Abort,
    Add,
    Call,
    Command,
    Drivable,
    Embed,
    End,
    EngineFailedError,
    EngineThread,
    Heartbeat,
    NewRequest,
    run,
)
from jaxinfer.listeners import Answers, Failed, Listener
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.request import OutputDelta

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_EXIT_SECONDS = 10.0  # that a step under way gets when the interpreter ends


class EngineLoop:
    """Sends an engine's deltas to whoever asked for them: `LLM`, `AsyncLLM` and `LocalBackend` are layers over it. While a request is under
    way the engine is this loop's alone. Methods are any thread's, take no lock and return at once, except where they say that they wait.

    The thread is a daemon. It ends with `close`, with the interpreter, and when nobody has the loop any more.
    """

    def __init__(self, engine: Drivable) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._inner = EngineThread(engine, self._inbox)
        self._thread = threading.Thread(target=run, args=(self._inbox, weakref.ref(self._inner)), name="engine", daemon=True)
        self._thread.start()
        engine.on_process_loss(partial(_lose_by, weakref.ref(self._inner)))
        # After what the engine and JAX have registered, hence before it: no step may be under way when devices go.
        at_exit = partial(_stop_at_exit, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, _let_go, self._inbox, at_exit).atexit = False

    @property
    def heartbeat(self) -> Heartbeat:
        return self._inner.heartbeat

    @property
    def num_unseen(self) -> int:
        """Requests submitted that the engine's gauges don't count yet."""
        return len(self._inner.unseen)

    @property
    def failure(self) -> BaseException | None:
        """What the engine failed by, after which it serves nothing; None while all is well."""
        return self._inner.failure

    def new_id(self) -> str:
        """A request id that no other call of this returns."""
        return f"request-{next(self._ids)}"

    def check(self) -> None:
        """Raise `EngineClosedError` or `EngineFailedError` where no request is taken any more."""
        self._engine.access.check()  # first: in a forked child nothing else may be touched
        if self._inner.has_ended:
            raise self._inner.refusal()

    def submit(self, requests: Sequence[NewRequest], listener: Listener) -> None:
        """Start requests. The listener gets their deltas until each of their n sequences has a finish_reason, or `Failed` for a request
        that turns out not to be servable. Raises what `check` raises."""
        self.check()
        self._inner.unseen.update([request.request_id for request in requests])
        self._send(Add(requests, listener))

    def stream(self, request: NewRequest) -> Generator[OutputDelta]:
        """Start a request with the first delta that is asked for, and wait for each. Closing it early aborts the request. Raises what `check`
        raises, and what the request fails by."""
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
        """Embed texts that the engine's `encode.reader` has read. The listener gets `Embedded` or `Failed`. Raises what `check` raises."""
        self.check()
        self._send(Embed(request_id, token_lists, listener))

    def abort(self, request_ids: Iterable[str], *, wait: bool = False) -> None:
        """Drop requests of either kind, after the step under way, whose end is waited for if asked. Ids of none are passed over."""
        if not self._engine.access.is_forked:
            self._send(Abort(frozenset(request_ids)))
            if wait and threading.current_thread() is not self._thread:  # where a stream may be let go of, too
                with suppress(EngineClosedError, EngineFailedError):
                    self.call(lambda: None)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread between two steps, and wait for its result. Raises what it raises, and what `check` raises."""
        self.check()
        result: Future[Result] = Future()
        self._send(Call(function, result))
        try:
            return result.result()
        except BaseException:
            result.cancel()  # where the waiting was interrupted
            raise

    def close(self, timeout: float | None = None) -> None:
        """End requests under way with `EngineClosedError`, close the engine, and wait for the thread's end, `timeout` seconds at most. Of no
        effect the second time, nor in a forked child."""
        self._stop(End(closes_engine=True), timeout)
        if self._inner.failure is not None and not self._engine.access.is_closed:
            try:
                self._engine.close()
            except Exception as error:
                logger.warning("the engine that failed could not be closed: %s: %s", type(error).__name__, error)

    def exit(self) -> None:
        """End the thread with the interpreter. Threads that still wait are daemons, which it ends too: nothing is told them."""
        self._stop(End(tells_waiting=False), _EXIT_SECONDS)

    def _stop(self, command: End, timeout: float | None) -> None:
        if not self._engine.access.is_forked:
            self._send(command)
            self._thread.join(timeout)

    def _send(self, command: Command) -> None:
        self._inbox.put(command)
        if self._inner.has_ended:  # the thread may have looked into the inbox for the last time before
            self._inner.refuse_rest()


def _lose_by(thread_of: weakref.ref[EngineThread], error: ProcessLostError) -> None:
    if (thread := thread_of()) is not None:
        thread.lose(error)


def _stop_at_exit(loop_of: weakref.ref[EngineLoop]) -> None:
    if (loop := loop_of()) is not None:
        loop.exit()


def _let_go(inbox: queue.SimpleQueue[Command], at_exit: Callable[[], None]) -> None:
    inbox.put(End())
    atexit.unregister(at_exit)
