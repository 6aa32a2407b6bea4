"""EngineThread: runs in the only thread that uses an engine. Commands come in through a queue, events go to
listeners."""

from __future__ import annotations

import logging
import queue
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxinfer.encode.text_batching import Embedded, TokenIds
from jaxinfer.encode.worker import EncodeWorker
from jaxinfer.engine_access import EngineAccess, EngineClosedError
from jaxinfer.kv_transfer.remote import Remote
from jaxinfer.listeners import Event, Failed, Listener, deliver
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.request import DEFAULT_CONTEXT, OutputDelta, RequestContext, RequestError, SamplingParams
from jaxinfer.segments import Prompt

logger = logging.getLogger(__name__)

_ADDED_AT_ONCE = 256  # requests between two steps: thousands would delay everyone's tokens by a second


class EngineFailedError(RuntimeError):
    """A step raised an error, which is this one's cause: the engine serves nothing any more."""


class Heartbeat(NamedTuple):
    """For a watchdog: a busy engine hangs if it has finished no iteration for long."""

    is_busy: bool
    finished_at: float  # seconds, time.monotonic(): end of the last iteration, or when an idle engine got work


@dataclass(frozen=True, slots=True)
class NewRequest:
    request_id: str  # see `EngineLoop.new_id`
    prompt: Prompt  # as `Engine.validate` gave it for these params
    params: SamplingParams
    context: RequestContext = DEFAULT_CONTEXT
    remote: Remote | None = None  # where another engine prefills or decodes it
    output_ids: tuple[int, ...] = ()  # tokens that it has already, from another engine: what comes is after them


@dataclass(frozen=True, slots=True)
class AddRequests:
    requests: Sequence[NewRequest]
    listener: Listener


@dataclass(frozen=True, slots=True)
class EmbedTexts:
    request_id: str
    token_lists: Sequence[TokenIds]
    listener: Listener


@dataclass(frozen=True, slots=True)
class AbortRequests:
    request_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class RunFunction:
    function: Callable[[], Any]
    result: Future[Any]
    is_long: bool = False  # it may take minutes, and then the engine doesn't hang


@dataclass(frozen=True, slots=True)
class StopThread:
    closes_engine: bool = False
    tells_waiting: bool = True


EngineCommand = AddRequests | EmbedTexts | AbortRequests | RunFunction | StopThread


@dataclass(slots=True)
class _UnderWay:
    listener: Listener
    num_unfinished: int  # of the request's n sequences


class Drivable(Protocol):
    """The part of `Engine` that a loop uses."""

    access: EngineAccess
    encode: EncodeWorker | None

    @property
    def has_requests(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def shares_mesh(self) -> bool: ...

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        remote: Remote | None = None,
        output_ids: tuple[int, ...] = (),
    ) -> None: ...

    def step(self) -> list[OutputDelta]: ...

    def abort(self, request_id: str) -> bool: ...

    def on_process_loss(self, listener: Callable[[ProcessLostError], None]) -> None: ...

    def close(self) -> None: ...


class EngineThread:
    """One instance a loop. Any thread may call `refusal`, `refuse_rest` and `lose`, and read `heartbeat`, `failure` and
    `has_ended`."""

    def __init__(self, engine: Drivable, inbox: queue.SimpleQueue[EngineCommand]) -> None:
        self._engine = engine
        self.inbox = inbox
        self.unseen: set[str] = set()  # submitted requests that the engine's gauges don't include yet
        self.has_ended = False
        self.failure: BaseException | None = None
        self.heartbeat = Heartbeat(False, time.monotonic())
        self._waiting: deque[tuple[NewRequest, Listener]] = deque()
        self._requests: dict[str, _UnderWay] = {}
        self._embeddings: dict[str, Listener] = {}
        self._events: dict[Listener, list[Event]] = {}
        self._is_driven_by_hand = False

    def refusal(self) -> Exception:
        """The error for further commands."""
        if self.failure is None:
            return EngineClosedError("the engine is closed: nothing can be asked of it any more; make a new one")
        error = EngineFailedError(f"the engine failed ({type(self.failure).__name__}: {self.failure}): make a new one")
        error.__cause__ = self.failure
        return error

    def refuse_rest(self) -> None:
        """Refuse commands that came in after the end."""
        while True:
            try:
                command = self.inbox.get_nowait()
            except queue.Empty:
                return
            match command:
                case AddRequests(requests, listener):
                    deliver(listener, [Failed(request.request_id, self.refusal()) for request in requests])
                case EmbedTexts(request_id, _, listener):
                    deliver(listener, [Failed(request_id, self.refusal())])
                case RunFunction(_, result) if result.set_running_or_notify_cancel():
                    result.set_exception(self.refusal())

    def lose(self, error: ProcessLostError) -> None:
        """Fail all requests, though the current step may wait for the lost process for ever."""
        if not self.has_ended:
            self.failure = error
            self._finish(error)

    def work(self, command: EngineCommand) -> bool:
        """Execute a command, then iterate until nothing is left to do; False after the last command. Called by the
        loop's own thread only."""
        try:
            with self._engine.access.drive():
                self._is_driven_by_hand = self._engine.has_requests
                self.heartbeat = Heartbeat(True, time.monotonic())
                goes_on = self._carry_out(command) and self._take_commands()
                while goes_on and self._has_work:
                    self._iterate()
                    goes_on = self._take_commands()
            self.heartbeat = Heartbeat(False, time.monotonic())
            return goes_on
        except BaseException as error:
            self.failure = self.failure or error
            if not isinstance(self.failure, ProcessLostError):  # that one is logged already, and ends this process
                logger.critical("the engine failed; nothing is served until a restart", exc_info=error)
            self._finish(error)
            return False

    @property
    def _steps_engine(self) -> bool:
        return self._engine.has_work and not self._is_driven_by_hand

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or self._steps_engine or (self._engine.encode is not None and self._engine.encode.has_work)

    def _take_commands(self) -> bool:
        while not self.inbox.empty():
            if not self._carry_out(self.inbox.get()):
                return False
        return True

    def _carry_out(self, command: EngineCommand) -> bool:
        """False for the last command."""
        match command:
            case AddRequests(requests, listener):
                self._waiting.extend([(request, listener) for request in requests])
            case EmbedTexts(request_id, token_lists, listener):
                assert self._engine.encode is not None
                self._engine.encode.add(request_id, token_lists)
                self._embeddings[request_id] = listener
            case AbortRequests(request_ids):
                self._abort(request_ids)
            case RunFunction(function, result, is_long) if result.set_running_or_notify_cancel():
                if is_long:
                    self.heartbeat = Heartbeat(False, time.monotonic())
                try:
                    result.set_result(function())
                except BaseException as error:
                    result.set_exception(error)
                if is_long:
                    self.heartbeat = Heartbeat(True, time.monotonic())
            case StopThread(closes_engine, tells_waiting):
                for request_id in self._requests:
                    self._engine.abort(request_id)
                if closes_engine and not self._engine.access.is_closed:
                    self._engine.close()
                self._finish(self.refusal() if tells_waiting else None)
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
        self.unseen -= request_ids

    def _iterate(self) -> None:
        """Add waiting requests, run one step of the engine and one of the encoder, deliver the events."""
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
        self.heartbeat = Heartbeat(True, time.monotonic())
        events, self._events = self._events, {}
        for listener, of_listener in events.items():
            deliver(listener, of_listener)

    def _add_waiting(self) -> None:
        for _ in range(min(len(self._waiting), _ADDED_AT_ONCE)):
            request, listener = self._waiting.popleft()
            try:
                if self._is_driven_by_hand:
                    raise RequestError("the engine has requests that were added to it by hand: step until they end, or abort them, before")
                self._engine.add_request(
                    request.request_id, request.prompt, request.params, request.context, request.remote, request.output_ids
                )
                self._requests[request.request_id] = _UnderWay(listener, request.params.n)
            except RequestError as error:
                self._events.setdefault(listener, []).append(Failed(request.request_id, error))
            except BaseException:
                self._waiting.appendleft((request, listener))  # who waits for it is told that the engine failed
                raise
            self.unseen.discard(request.request_id)

    def _step_encoder(self) -> list[Embedded]:
        """Run one batch of texts for each engine step."""
        engine = self._engine
        if engine.encode is None or not engine.encode.has_work:
            return []
        is_alone = not self._steps_engine
        # On a shared mesh the batch ends before the engine's last step: waiting for it costs no time, and times both.
        return engine.encode.step(wait=is_alone or engine.shares_mesh, most_in_flight=2 if is_alone else 1)

    def _finish(self, error: BaseException | None) -> None:
        """Take no more commands; fail unfinished requests with this error, if there is one."""
        self.has_ended = True
        self.heartbeat = Heartbeat(False, time.monotonic())
        if error is not None:
            self._fail(error)
        for of_thread in (self._waiting, self._requests, self._embeddings, self._events, self.unseen):
            of_thread.clear()
        self.refuse_rest()

    def _fail(self, error: BaseException) -> None:
        events = self._events.copy()  # copies, since `lose` runs in another thread
        listeners = {request_id: request.listener for request_id, request in self._requests.copy().items()} | self._embeddings
        listeners |= {request.request_id: listener for request, listener in self._waiting.copy()}
        for request_id, listener in listeners.items():
            events.setdefault(listener, []).append(Failed(request_id, error))
        for listener, of_listener in events.items():
            deliver(listener, of_listener)


def run(inbox: queue.SimpleQueue[EngineCommand], thread_of: weakref.ref[EngineThread]) -> None:
    """The engine's thread. While idle it references only the inbox, so that an unused loop is garbage collected."""
    while True:
        command = inbox.get()
        thread = thread_of()
        if thread is None or not thread.work(command):
            return
        del command, thread
