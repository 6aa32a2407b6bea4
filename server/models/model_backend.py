"""ModelBackend: the engine of one of several models, whose requests wait until it is awake."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxinfer.encode.text_batching import Embedded, TokenIds
from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from server.backend import Overloaded, Unavailable
from server.models.model_weight_control import ModelWeightControl
from server.models.resident import Resident
from server.models.turns import RETRY_SECONDS, ModelTurns, TurnTimeout
from server.queue_room import WaitingRequest, has_room


class ModelBackend:
    """See `Backend`. What wakes and ends it is `SeveralModels`. `max_waiting`: requests that may wait for it to be
    awake, shared by tenants as the queue of an engine is."""

    def __init__(self, resident: Resident, turns: ModelTurns, max_waiting: int) -> None:
        self._resident, self._turns, self._max_waiting = resident, turns, max_waiting
        self._inner = inner = resident.backend
        self.max_model_len, self.max_batch_size = inner.max_model_len, inner.max_batch_size
        self.sampling_defaults, self.text_reader = inner.sampling_defaults, inner.text_reader
        self._waiting: dict[str, WaitingRequest] = {}  # by request id

    @property
    def name(self) -> str:
        return self._resident.name

    @property
    def status(self) -> str:
        """As `/ready` names it."""
        return self.failure() or self._resident.status

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the model to be awake, and are in no engine's count."""
        return len(self._resident.waiting)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Prompt:
        """See `Backend`."""
        return self._inner.validate(prompt_token_ids, params)

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> AsyncGenerator[OutputDelta]:
        """See `Backend`."""
        if (failure := self.failure()) is not None:
            raise Unavailable(failure)
        waiting = WaitingRequest(context.tenant, context.priority)
        if not has_room(waiting, self._waiting.values(), len(self._waiting), self._max_waiting):
            raise Overloaded(RETRY_SECONDS)
        self._waiting[request_id] = waiting
        try:
            async with self._turns.inside(self._resident, context.deadline):
                del self._waiting[request_id]
                async with aclosing(self._inner.generate(request_id, prompt, params, context)) as deltas:
                    async for delta in deltas:
                        yield delta
        except TurnTimeout:
            for index in range(params.n):
                yield OutputDelta(request_id, index, finish_reason=FinishReason.TIMEOUT)
        finally:
            self._waiting.pop(request_id, None)

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds], context: RequestContext = DEFAULT_CONTEXT) -> Embedded:
        """See `Backend`. The embedding model never sleeps."""
        return await self._inner.embed(request_id, token_lists, context)

    def stats(self) -> EngineStats:
        """The engine's own, live."""
        return self._inner.stats()

    def cluster(self) -> None:
        return None

    def models(self) -> None:
        return None

    def weight_control(self) -> ModelWeightControl:
        """See `Backend`."""
        return ModelWeightControl(self._turns, self._resident)

    def is_ready(self) -> bool:
        """Whether it takes requests, which may have to wait for it."""
        return self.failure() is None and not self._resident.is_kept_asleep

    def failure(self) -> str | None:
        """See `Backend`."""
        failure = self._inner.failure()
        return None if failure is None else f"{self.name}: {failure}"

    def iteration_seconds(self) -> float:
        """See `Backend`."""
        return self._inner.iteration_seconds()

    async def start(self) -> None:
        """Starts the engine's thread; the model may sleep."""
        await self._inner.start()

    def abort_all(self) -> None:
        """See `Backend`."""
        self._inner.abort_all()

    async def stop(self) -> None:
        """See `Backend`."""
        await self._inner.stop()
