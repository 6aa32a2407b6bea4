"""Time that passes only when a test says so, or a make-believe device is waited for; and what comes of an engine's requests in it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from jaxinfer.engine import Engine
from jaxinfer.prefill.scheduler import Chunk
from jaxinfer.request import ANYONE, FinishReason, OutputDelta, RequestContext, RequestOutput, SamplingParams
from tests.engine.page_audit import audit

_CALL_SECONDS = 1e-7  # so that no two steps start at the same time


class Clock:
    """In place of the module `time` too, as the engine uses it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def thread_time(self) -> float:
        return time.thread_time()


class SimulatedDevice:
    """Runs what it is given in order, and is given all of it at once."""

    def __init__(self, clock: Clock, step_seconds: float = 0.01, token_seconds: float = 0.001) -> None:
        self.busy_seconds = 0.0
        self._clock = clock
        self._step_seconds, self._token_seconds = step_seconds, token_seconds
        self._free_at = 0.0

    def run(self, values: np.ndarray, num_tokens: int) -> TimedArray:
        seconds = self._step_seconds + num_tokens * self._token_seconds
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self.busy_seconds += seconds
        self._clock.now += _CALL_SECONDS
        return TimedArray(values, self._free_at, self._clock)


class TimedArray:
    """An array that a device has filled at a certain time. Who reads it before waits."""

    def __init__(self, values: np.ndarray, filled_at: float, clock: Clock) -> None:
        self._values = values
        self._filled_at = filled_at
        self._clock = clock

    def is_ready(self) -> bool:
        return self._clock.now >= self._filled_at

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self._clock.now = max(self._clock.now, self._filled_at)
        return self._values


class Driver:
    """An engine whose requests' outputs are gathered. After each step its pages are counted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[str, RequestOutput] = {}
        self.params: dict[str, SamplingParams] = {}
        self.deltas: list[OutputDelta] = []

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, context: RequestContext = ANYONE) -> None:
        self.engine.add_request(request_id, prompt, params, context)
        self.outputs[request_id] = RequestOutput.empty(request_id, None, list(prompt), params)
        self.params[request_id] = params

    def step(self) -> list[OutputDelta]:
        deltas = self.engine.step()
        for delta in deltas:
            output = self.outputs[delta.request_id]
            assert output.outputs[delta.index].finish_reason is None, "a delta after the last one"
            output.add(delta)
        self.deltas += deltas
        audit(self.engine)
        return deltas

    def finish(self, *request_ids: str, most_steps: int = 10_000) -> None:
        """Go on until these requests have ended, or all of them."""
        for _ in range(most_steps):
            if all(self.outputs[i].is_finished for i in request_ids) if request_ids else not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"no end in {most_steps} steps")

    def ask(self, request_id: str, prompt: Sequence[int], params: SamplingParams, context: RequestContext = ANYONE) -> RequestOutput:
        """Serve a request to its end."""
        self.add(request_id, prompt, params, context)
        self.finish(request_id)
        return self.outputs[request_id]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self.outputs[request_id].outputs[index].token_ids

    def reason(self, request_id: str, index: int = 0) -> FinishReason | None:
        return self.outputs[request_id].outputs[index].finish_reason


@contextmanager
def recorded_chunks(engine: Engine) -> Iterator[list[Chunk]]:
    """The chunks that prefill starts meanwhile."""
    chunks: list[Chunk] = []
    scheduler = engine._parts.prefill.scheduler
    schedule = scheduler.schedule

    def record(*arguments: object) -> list[Chunk]:
        planned = schedule(*arguments)  # type: ignore[arg-type]
        chunks.extend(planned)
        return planned

    scheduler.schedule = record  # type: ignore[method-assign]
    try:
        yield chunks
    finally:
        del scheduler.schedule  # the class's own again
