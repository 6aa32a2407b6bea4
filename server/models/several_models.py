"""SeveralModels: the models of one process as one backend: they start, are watched and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from jaxinfer.encode.text_batching import Embedded, TextReader, TokenIds
from jaxinfer.request import DEFAULT_CONTEXT, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from server.backend import Backend, ModelReport
from server.models.memory import bytes_awake
from server.models.model_backend import ModelBackend
from server.models.model_weight_control import ModelWeightControl
from server.models.resident import Resident
from server.models.turns import ModelTurns, TurnSettings


class SeveralModels:
    """See `Backend`. What concerns one model is the first's; `each` has all of them, in their order."""

    def __init__(self, backends: Mapping[str, Backend], settings: TurnSettings, max_waiting: int) -> None:
        """`backends`: each model's by name, all of them asleep; each fits by itself. `max_waiting`: see
        `ModelBackend`."""
        self._residents = [Resident(name, bytes_awake(backend.stats()), backend) for name, backend in backends.items()]
        assert all(resident.num_bytes <= settings.limits.room for resident in self._residents)
        self._turns = ModelTurns(self._residents, settings)
        self.each = [ModelBackend(resident, self._turns, max_waiting) for resident in self._residents]
        self._first = self.each[0]
        self._sums = EngineStats()
        self.max_model_len, self.max_batch_size = self._first.max_model_len, self._first.max_batch_size

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._first.sampling_defaults

    @property
    def text_reader(self) -> TextReader | None:
        return self._first.text_reader

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Prompt:
        """See `Backend`."""
        return self._first.validate(prompt_token_ids, params)

    def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> AsyncGenerator[OutputDelta]:
        """See `Backend`."""
        return self._first.generate(request_id, prompt, params, context)

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds], context: RequestContext = DEFAULT_CONTEXT) -> Embedded:
        """See `Backend`."""
        return await self._first.embed(request_id, token_lists, context)

    def stats(self) -> EngineStats:
        """Requests and sequences of all models together; nothing else."""
        sums, stats = self._sums, [model.stats() for model in self.each]
        for name in ("num_requests", "num_waiting", "num_prefilling", "num_running"):
            setattr(sums, name, sum(getattr(one, name) for one in stats))
        sums.num_waiting += sum(model.num_waiting for model in self.each)
        return sums

    def cluster(self) -> None:
        return None

    def models(self) -> dict[str, ModelReport]:
        """See `Backend`."""
        return {
            model.name: ModelReport(model.status, model.stats(), model.num_waiting, resident.num_wakes, resident.num_sleeps)
            for model, resident in zip(self.each, self._residents, strict=True)
        }

    def weight_control(self) -> ModelWeightControl:
        """See `Backend`."""
        return self._first.weight_control()

    def is_ready(self) -> bool:
        """Whether any model takes requests."""
        return self.failure() is None and any(model.is_ready() for model in self.each) and self._turns.is_open

    def failure(self) -> str | None:
        """Of the first model that failed, or of their turns: only a restart mends it."""
        return next(filter(None, (self._turns.failure, *(model.failure() for model in self.each))), None)

    def iteration_seconds(self) -> float:
        """See `Backend`."""
        return max(model.iteration_seconds() for model in self.each)

    async def start(self) -> None:
        """Starts all engines' threads, and wakes models while there is room."""
        for model in self.each:
            await model.start()
        await self._turns.start()

    def abort_all(self) -> None:
        """See `Backend`."""
        self._turns.close()
        for model in self.each:
            model.abort_all()

    async def stop(self) -> None:
        """See `Backend`."""
        self._turns.close()
        await asyncio.gather(*(model.stop() for model in self.each))
