"""EngineLoop: the one thread that touches an engine, for requests that come from any thread."""

from __future__ import annotations

import atexit
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxinfer.encode.texts import Embedded, TokenIds
from jaxinfer.engine import Engine
from jaxinfer.engine_access import EngineClosedError
from jaxinfer.request import ANYONE, OutputDelta, RequestContext, RequestError, SamplingParams

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_ADDED_AT_ONCE = 256  # requests between two steps: adding thousands takes a second, in which nobody else would get a token
_EXIT_SECONDS = 10.0  # that a step under way gets when the interpreter ends


class EngineFailedError(RuntimeError):
    """An earlier step raised an error, which is this one's cause: the engine serves nothing any more."""


class Failed(NamedTuple):
    """A request has ended by an error: nothing more comes of it."""

    request_id: str
    error: BaseException


Event = OutputDelta | Embedded | Failed


class Listener(Protocol):
    def deliver(self, events: list[Event]) -> None:
        """What one iteration had for this listener's requests. Called in the engine's thread, which it must not keep waiting."""
        ...


class Heartbeat(NamedTuple):
    """For a watchdog: an engine that is busy and has finished no iteration for long hangs."""

    is_busy: bool
    finished_at: float  # seconds, time.monotonic(): the last iteration's end, or when work came to an idle engine


@dataclass(frozen=True, slots=True)
class NewRequest:
    request_id: str  # see `EngineLoop.new_id`
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    context: RequestContext = ANYONE


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[NewRequest]
    listener: Listener


@dataclass(frozen=True, slots=True)
class _Embed:
    request_id: str
    token_lists: Sequence[TokenIds]
    listener: Listener


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class _End:
    closes_engine: bool


_Command = _Add | _Embed | _Abort | _Call | _End


@dataclass(slots=True)
class _UnderWay:
    listener: Listener
    num_unfinished: int  # of its n sequences


class EngineLoop:
    """Sends an engine's deltas to whoever asked for them: `LLM`, `AsyncLLM` and `LocalBackend` are layers over it. While a request is under
    way the engine is this loop's alone. Methods are any thread's, take no lock and return at once, except where they say that they wait.

    The thread is a daemon. It ends with `close`, with the interpreter, and when nobody has the loop any more.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._unseen: set[str] = set()
        self._ids = itertools.count()
        self._has_ended = False
        self._failure: BaseException | None = None
        self._heartbeat = Heartbeat(False, time.monotonic())
        # The engine's thread's own
        self._waiting: deque[tuple[NewRequest, Listener]] = deque()
        self._requests: dict[str, _UnderWay] = {}
        self._embeddings: dict[str, Listener] = {}
        self._events: dict[Listener, list[Event]] = {}
        self._is_driven_by_hand = False
        loop_of = weakref.ref(self)
        self._thread = threading.Thread(target=_run, args=(self._inbox, loop_of), name="engine", daemon=True)
        self._thread.start()
        # After what the engine and JAX have registered, hence before it: no step may be under way when devices go.
        at_exit = partial(_stop_at_exit, loop_of)
        atexit.register(at_exit)
        weakref.finalize(self, _let_go, self._inbox, at_exit).atexit = False

    @property
    def heartbeat(self) -> Heartbeat:
        return self._heartbeat

    @property
    def num_unseen(self) -> int:
        """Requests submitted that the engine's gauges don't count yet."""
        return len(self._unseen)

    @property
    def failure(self) -> BaseException | None:
        """What the engine failed by, after which it serves nothing; None while all is well."""
        return self._failure

    def new_id(self) -> str:
        """A request id that no other call of this returns."""
        return f"request-{next(self._ids)}"

    def check(self) -> None:
        """Raise `EngineClosedError` or `EngineFailedError` where no request is taken any more."""
        self._engine.access.check()  # first: in a forked child nothing else may be touched
        if self._has_ended:
            raise self._refusal()

    def submit(self, requests: Sequence[NewRequest], listener: Listener) -> None:
        """Start requests. The listener gets their deltas until each of their n sequences has a finish_reason, or `Failed` for a request
        that turns out not to be servable. Raises what `check` raises."""
        self.check()
        self._unseen.update([request.request_id for request in requests])
        self._send(_Add(requests, listener))

    def embed(self, request_id: str, token_lists: Sequence[TokenIds], listener: Listener) -> None:
        """Embed texts that the engine's `encode.reader` has read. The listener gets `Embedded` or `Failed`. Raises what `check` raises."""
        self.check()
        self._send(_Embed(request_id, token_lists, listener))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests of either kind, after the step under way. Ids of none are passed over."""
        if not self._engine.access.is_forked:
            self._send(_Abort(frozenset(request_ids)))

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread between two steps, and wait for its result. Raises what it raises, and what `check` raises."""
        self.check()
        result: Future[Result] = Future()
        self._send(_Call(function, result))
        try:
            return result.result()
        except BaseException:
            result.cancel()  # where the waiting was interrupted
            raise

    def close(self, timeout: float | None = None) -> None:
        """End requests under way with `EngineClosedError`, close the engine, and wait for the thread's end, `timeout` seconds at most. Of no
        effect the second time, nor in a forked child."""
        self.stop(timeout, closes_engine=True)
        if self._failure is not None and not self._engine.access.is_closed:
            try:
                self._engine.close()
            except Exception as error:
                logger.warning("the engine that failed could not be closed: %s: %s", type(error).__name__, error)

    def stop(self, timeout: float | None, *, closes_engine: bool = False) -> None:
        """End requests under way and the thread, but leave the engine as it is unless `closes_engine`."""
        if not self._engine.access.is_forked:
            self._send(_End(closes_engine))
            self._thread.join(timeout)

    def _send(self, command: _Command) -> None:
        self._inbox.put(command)
        if self._has_ended:  # the thread may have looked into the inbox for the last time before
            self._refuse_rest()

    def _refusal(self) -> Exception:
        if self._failure is None:
            return EngineClosedError("the engine is closed: nothing can be asked of it any more; make a new one")
        error = EngineFailedError(f"the engine failed ({type(self._failure).__name__}: {self._failure}): make a new one")
        error.__cause__ = self._failure
        return error

    def _refuse_rest(self) -> None:
        """Answer what came after the end. Any thread's."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            match command:
                case _Add(requests, listener):
                    _deliver(listener, [Failed(request.request_id, self._refusal()) for request in requests])
                case _Embed(request_id, _, listener):
                    _deliver(listener, [Failed(request_id, self._refusal())])
                case _Call(_, result) if result.set_running_or_notify_cancel():
                    result.set_exception(self._refusal())

    # The engine's thread

    def work(self, command: _Command) -> bool:
        """Carry out a command, then work until nothing is left to do; False at the end. For the loop's own thread."""
        try:
            with self._engine.access.drive():
                self._is_driven_by_hand = self._engine.has_requests
                self._heartbeat = Heartbeat(True, time.monotonic())
                goes_on = self._carry_out(command)
                while goes_on and self._has_work:
                    self._iterate()
                    goes_on = self._take_commands()
            self._heartbeat = Heartbeat(False, time.monotonic())
            return goes_on
        except BaseException as error:
            logger.critical("the engine failed; nothing is served until a restart", exc_info=error)
            self._failure = error
            self._finish(error)
            return False

    @property
    def _steps_engine(self) -> bool:
        return self._engine.has_work and not self._is_driven_by_hand

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or self._steps_engine or (self._engine.encode is not None and self._engine.encode.has_work)

    def _take_commands(self) -> bool:
        while not self._inbox.empty():
            if not self._carry_out(self._inbox.get()):
                return False
        return True

    def _carry_out(self, command: _Command) -> bool:
        """False if it is the last one."""
        match command:
            case _Add(requests, listener):
                self._waiting.extend([(request, listener) for request in requests])
            case _Embed(request_id, token_lists, listener):
                assert self._engine.encode is not None
                self._engine.encode.add(request_id, token_lists)
                self._embeddings[request_id] = listener
            case _Abort(request_ids):
                self._abort(request_ids)
            case _Call(function, result) if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except BaseException as error:
                    result.set_exception(error)
            case _End(closes_engine):
                for request_id in self._requests:
                    self._engine.abort(request_id)
                if closes_engine and not self._engine.access.is_closed:
                    self._engine.close()
                self._finish(self._refusal())
                return False
        return True

    def _abort(self, request_ids: frozenset[str]) -> None:
        for request_id in request_ids:
            if self._requests.pop(request_id, None) is not None:
                self._engine.abort(request_id)
            elif self._embeddings.pop(request_id, None) is not None:
                assert self._engine.encode is not None
                self._engine.encode.abort(request_id)
        self._waiting = deque(entry for entry in self._waiting if entry[0].request_id not in request_ids)
        self._unseen -= request_ids

    def _iterate(self) -> None:
        """Add what waits, take one step of the engine and one of the encoder, and tell the listeners."""
        self._add_waiting()
        if self._steps_engine:
            for delta in self._engine.step():
                request = self._requests[delta.request_id]
                self._events.setdefault(request.listener, []).append(delta)
                if delta.finish_reason is not None:
                    request.num_unfinished -= 1
                    if not request.num_unfinished:
                        del self._requests[delta.request_id]
        for done in self._step_encoder():
            self._events.setdefault(self._embeddings.pop(done.request_id), []).append(done)
        self._heartbeat = Heartbeat(True, time.monotonic())
        events, self._events = self._events, {}
        for listener, of_listener in events.items():
            _deliver(listener, of_listener)

    def _add_waiting(self) -> None:
        for _ in range(min(len(self._waiting), _ADDED_AT_ONCE)):
            request, listener = self._waiting.popleft()
            try:
                if self._is_driven_by_hand:
                    raise RequestError("the engine has requests that were added to it by hand: step until they end, or abort them, before")
                self._engine.add_request(request.request_id, request.prompt_token_ids, request.params, request.context)
                self._requests[request.request_id] = _UnderWay(listener, request.params.n)
            except RequestError as error:
                self._events.setdefault(listener, []).append(Failed(request.request_id, error))
            self._unseen.discard(request.request_id)

    def _step_encoder(self) -> list[Embedded]:
        """One batch of texts for each step of the engine."""
        engine = self._engine
        if engine.encode is None or not engine.encode.has_work:
            return []
        is_alone = not self._steps_engine
        # On one mesh the batch ends before the engine's last step does: reading it costs no time, and tells theirs.
        return engine.encode.step(wait=is_alone or engine.shares_mesh, most_in_flight=2 if is_alone else 1)

    def _finish(self, error: BaseException) -> None:
        """Take no more commands, and tell everyone who waits."""
        self._has_ended = True
        self._heartbeat = Heartbeat(False, time.monotonic())
        events = self._events
        listeners = {request_id: request.listener for request_id, request in self._requests.items()} | self._embeddings
        listeners |= {request.request_id: listener for request, listener in self._waiting}
        for request_id, listener in listeners.items():
            events.setdefault(listener, []).append(Failed(request_id, error))
        for listener, of_listener in events.items():
            _deliver(listener, of_listener)
        for of_thread in (self._waiting, self._requests, self._embeddings, self._events, self._unseen):
            of_thread.clear()
        self._refuse_rest()


def _deliver(listener: Listener, events: list[Event]) -> None:
    try:
        listener.deliver(events)
    except Exception as error:  # one caller's fault is not the others'
        logger.error("events of %d requests are lost", len(events), exc_info=error)


def _run(inbox: queue.SimpleQueue[_Command], loop_of: weakref.ref[EngineLoop]) -> None:
    """The engine's thread. While idle it holds the inbox only, so that a loop nobody has any more is let go of."""
    while True:
        command = inbox.get()
        loop = loop_of()
        if loop is None or not loop.work(command):
            return
        del command, loop


def _stop_at_exit(loop_of: weakref.ref[EngineLoop]) -> None:
    if (loop := loop_of()) is not None:
        loop.stop(_EXIT_SECONDS)


def _let_go(inbox: queue.SimpleQueue[_Command], at_exit: Callable[[], None]) -> None:
    inbox.put(_End(closes_engine=False))
    atexit.unregister(at_exit)
