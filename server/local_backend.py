"""LocalBackend: an engine in this process behind the HTTP front: admission, and the engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxinfer.async_requests import AsyncRequests
from jaxinfer.encode.text_batching import Embedded, TokenIds
from jaxinfer.engine import Engine
from jaxinfer.engine_access import EngineClosedError
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.engine_thread import Heartbeat, NewRequest
from jaxinfer.request import DEFAULT_CONTEXT, MODEL_ASLEEP, OutputDelta, RequestContext, RequestError, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from server.admission import AdmissionRate
from server.backend import Overloaded, Unavailable
from server.logs import current_request
from server.queue_room import WaitingRequest, has_room, has_room_for_texts
from server.request_gate import RequestGate
from server.tracing import begin, note_usage
from server.weight_control import EngineWeightControl

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 120.0  # seconds
# to embed at once: the engine's thread scans all waiting ones for each of their batches, 2 ms for that many
MAX_TEXTS = 16_384
ASLEEP = "the model is asleep: wake it with POST /v1/models/ID/wake"
JOIN_TIMEOUT = 30.0  # seconds for the engine's thread to end its last step and to save its caches


class LocalBackend:
    """All state here belongs to the event loop; the engine is used by its own thread alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.max_model_len = engine.max_model_len
        self.max_batch_size = engine.config.schedule.max_batch_size
        self.sampling_defaults = engine.sampling_defaults
        self.text_reader = None if engine.encode is None else engine.encode.reader
        self._engine_loop: EngineLoop | None = None  # from `start` on, as is the next
        self._requests: AsyncRequests | None = None
        self._unserved: dict[str, WaitingRequest] = {}  # by request id
        self._admissions = AdmissionRate()
        self._unembedded: dict[str, tuple[WaitingRequest, int]] = {}  # by request id, with its number of texts
        self._embedding_pace = AdmissionRate()
        self._num_under_way = 0  # requests of both kinds
        self._gate = RequestGate()
        self._weight_control: EngineWeightControl | None = None
        self._is_stopping = False
        self._quiet = asyncio.Event()
        self._quiet.set()

    def stats(self) -> EngineStats:
        """The engine's own, live."""
        return self._engine.stats

    def cluster(self) -> None:
        return None

    def models(self) -> None:
        return None

    def heartbeat(self) -> Heartbeat:
        """When the engine's thread last finished an iteration, and whether it has work. After `start`."""
        assert self._engine_loop is not None
        return self._engine_loop.heartbeat

    def iteration_seconds(self) -> float:
        """See `Backend`."""
        heartbeat = self.heartbeat() if self._engine_loop is not None else None
        return time.monotonic() - heartbeat.finished_at if heartbeat is not None and heartbeat.is_busy else 0.0

    def weight_control(self) -> EngineWeightControl:
        """See `Backend`. After `start`."""
        assert self._weight_control is not None
        return self._weight_control

    def is_ready(self) -> bool:
        return self._is_serving and not self._engine.stats.is_asleep

    @property
    def _is_serving(self) -> bool:
        return self._engine_loop is not None and not self._is_stopping and self.failure() is None

    def failure(self) -> str | None:
        error = None if self._engine_loop is None else self._engine_loop.failure
        return None if error is None else _failure(error)

    async def start(self) -> None:
        """Start the engine's thread."""
        assert self._engine_loop is None, "a LocalBackend starts once"
        self._engine_loop = EngineLoop(self._engine)
        self._requests = AsyncRequests(self._engine_loop)
        self._weight_control = EngineWeightControl(self._engine, self._engine_loop, self._gate)

    def abort_all(self) -> None:
        """See `Backend`. Returns at once."""
        self._is_stopping = True
        if self._engine_loop is not None:
            self._engine_loop.close(0.0)

    async def stop(self) -> None:
        """Refuses new requests, finishes running ones, then closes the engine and ends its thread."""
        self._is_stopping = True
        await self._quiet.wait()
        if self._engine_loop is not None:
            await asyncio.to_thread(self._engine_loop.close, JOIN_TIMEOUT)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Prompt:
        """See `Backend`."""
        return self._engine.validate(prompt_token_ids, params)

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> AsyncGenerator[OutputDelta]:
        """See `Backend`."""
        requests = self._open()
        if self._engine.stats.is_asleep:
            raise Unavailable(ASLEEP)
        waiting = WaitingRequest(context.tenant, context.priority)
        self._check_room(waiting)
        request = NewRequest(request_id, prompt, params, context)
        self._begin()
        self._admissions.wait(time.monotonic())
        self._unserved[request_id] = waiting
        is_admitted = False
        current = current_request.get()
        span = begin("engine", "" if current is None else current.traceparent, request_id=request_id, prompt_tokens=len(prompt))
        try:
            async with self._gate.inside(), aclosing(requests.stream(request)) as deltas:
                async for delta in deltas:
                    if not is_admitted:
                        is_admitted = True
                        del self._unserved[request_id]
                        self._admissions.admit(time.monotonic())
                        span.event("first token")
                    note_usage(span, delta)
                    yield delta
        except Exception as error:
            span.end(error)
            raise _error_for_caller(error) from error
        finally:
            span.end()
            if not is_admitted:
                del self._unserved[request_id]
                self._admissions.leave(time.monotonic())
            self._rest()

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds], context: RequestContext = DEFAULT_CONTEXT) -> Embedded:
        """See `Backend`."""
        requests = self._open()
        waiting = WaitingRequest(context.tenant, context.priority)
        self._check_room_for_texts(waiting, len(token_lists))
        self._unembedded[request_id] = waiting, len(token_lists)
        self._begin()
        self._embedding_pace.wait(time.monotonic())
        is_done = False
        try:
            embedded = await requests.embed(request_id, token_lists)
            is_done = True
            return embedded
        except Exception as error:
            raise _error_for_caller(error) from error
        finally:
            (self._embedding_pace.admit if is_done else self._embedding_pace.leave)(time.monotonic())
            del self._unembedded[request_id]
            self._rest()

    def _open(self) -> AsyncRequests:
        if not self._is_serving or self._requests is None:
            raise Unavailable(self.failure() or "the server is shutting down")
        return self._requests

    def _begin(self) -> None:
        self._num_under_way += 1
        self._quiet.clear()

    def _rest(self) -> None:
        self._num_under_way -= 1
        if not self._num_under_way:
            self._quiet.set()

    def _overloaded(self, pace: AdmissionRate) -> Overloaded:
        return Overloaded(min(max(pace.seconds_until_admitted(time.monotonic()), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS))

    def _check_room(self, request: WaitingRequest) -> None:
        """Requests that find a free slot don't wait, though the engine has not seen them yet."""
        stats, schedule = self._engine.stats, self._engine.config.schedule
        num_unseen = 0 if self._engine_loop is None else self._engine_loop.num_unseen
        num_free = max(0, schedule.max_batch_size - stats.num_running - stats.num_prefilling)
        num_waiting = max(0, stats.num_waiting + num_unseen - num_free)
        if not has_room(request, self._unserved.values(), num_waiting, schedule.max_queue_size):
            raise self._overloaded(self._admissions)

    def _check_room_for_texts(self, request: WaitingRequest, num_texts: int) -> None:
        others = [other for other, _ in self._unembedded.values()]
        texts = [(other.tenant, number) for other, number in self._unembedded.values()]
        has_place = has_room(request, others, len(others), self._engine.config.schedule.max_queue_size)
        if not has_place or not has_room_for_texts(request.tenant, num_texts, texts, MAX_TEXTS):
            raise self._overloaded(self._embedding_pace)


def _error_for_caller(error: Exception) -> Exception:
    """What the HTTP front gets as a request's error."""
    if isinstance(error, RequestError) and not isinstance(error, EngineClosedError):
        return Unavailable(ASLEEP) if error.code == MODEL_ASLEEP else error
    return Unavailable("the server is shutting down" if isinstance(error, EngineClosedError) else _failure(error))


def _failure(error: BaseException) -> str:
    return f"the engine failed ({type(error).__name__}: {error}); restart the server"
