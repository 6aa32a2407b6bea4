"""SeveralModels: the models of one process as one backend: they start, are watched and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from jaxinfer.config import ConfigError, format_bytes
from jaxinfer.encode.text_batching import Embedded, TextReader, TokenIds
from jaxinfer.engine import Engine
from jaxinfer.request import DEFAULT_CONTEXT, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from server.backend import ModelReport
from server.local_backend import LocalBackend
from server.models.memory import bytes_awake
from server.models.model_backend import ModelBackend, ModelWeightControl
from server.models.resident import Resident
from server.models.turns import ModelTurns, TurnSettings


class SeveralModels:
    """See `Backend`. What concerns one model is the first's; `each` has all of them, in their order."""

    def __init__(self, engines: Mapping[str, Engine], settings: TurnSettings) -> None:
        """`engines`: by name, all of them asleep. Raises `ConfigError` for one that needs more than all the room."""
        self._residents, self.each = [], list[ModelBackend]()
        inner = {name: LocalBackend(engine) for name, engine in engines.items()}
        for name, backend in inner.items():
            num_bytes, room = bytes_awake(backend.stats()), settings.limits.room
            if num_bytes > room:
                raise ConfigError(
                    f"models_memory is {format_bytes(room)}, but {name} alone needs {format_bytes(num_bytes)} for its weights and KV pages: "
                    "give more, or less kv_memory"
                )
            self._residents.append(Resident(name, num_bytes, backend.weight_control, backend.stats()))
        self._turns = ModelTurns(self._residents, settings)
        for resident, backend in zip(self._residents, inner.values(), strict=True):
            max_waiting = engines[resident.name].config.schedule.max_queue_size
            self.each.append(ModelBackend(backend, resident, self._turns, max_waiting))
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
        """The first model's that failed: only a restart mends it."""
        return next(filter(None, (model.failure() for model in self.each)), None)

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
