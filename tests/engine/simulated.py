"""Time that passes only when a test says so, or a make-believe device is waited for; and what comes of an engine's requests in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.prefill.scheduler import Chunk
from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, OutputDelta, RequestContext, RequestOutput, SamplingParams
from jaxinfer.segments import Prompt
from tests.engine.fake_device import expected_tokens, fake_engine
from tests.engine.page_audit import audit

MAX_MODEL_LEN = 400
STEP_SECONDS, TOKEN_SECONDS = 0.01, 0.001  # of a device's time: each step, and each token in it besides
_CALL_SECONDS = 1e-7  # so that no two steps start at the same time


class Clock:
    """Seconds; what a test adds to `now` has passed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SimulatedDevice:
    """Runs what it is given in order, and is given all of it at once."""

    def __init__(self, clock: Clock) -> None:
        self.busy_seconds = 0.0
        self._clock = clock
        self._free_at = 0.0

    def run(self, values: np.ndarray, num_tokens: int) -> TimedArray:
        seconds = STEP_SECONDS + num_tokens * TOKEN_SECONDS
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


def _token_ids(prompt: Sequence[int] | Prompt) -> Sequence[int]:
    return prompt.token_ids.tolist() if isinstance(prompt, Prompt) else prompt


class Driver:
    """An engine in simulated time, whose requests' outputs are gathered. After each step its pages are counted. `meshes`: "shared" or
    "two"; others of the configuration's settings by their names."""

    def __init__(self, clock: Clock, meshes: str = "shared", num_pages: int = 200, **settings: object) -> None:
        self.devices = [SimulatedDevice(clock) for _ in range(1 if meshes == "shared" else 2)]  # prefill's first
        flat = {"page_size": 8, "prefill_chunk_size": 64, "prefill_buckets": (64,), "max_batch_size": 4, "max_model_len": MAX_MODEL_LEN}
        decode_devices = (0,) if meshes == "shared" else (1,)
        config = EngineConfig.of(decode_devices=decode_devices, **flat | settings)
        self.engine = fake_engine(config, num_pages, devices=self.devices, clock=clock)
        self.outputs: dict[str, RequestOutput] = {}
        self.params: dict[str, SamplingParams] = {}
        self.deltas: list[OutputDelta] = []

    def add(
        self, request_id: str, prompt: Sequence[int] | Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> None:
        self.engine.add_request(request_id, prompt, params, context)
        self.outputs[request_id] = RequestOutput.empty(request_id, None, list(_token_ids(prompt)), params)
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

    def ask(
        self, request_id: str, prompt: Sequence[int] | Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> RequestOutput:
        """Serve a request to its end."""
        self.add(request_id, prompt, params, context)
        self.finish(request_id)
        return self.outputs[request_id]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self.outputs[request_id].outputs[index].token_ids

    def check_tokens(self) -> None:
        """Each sequence that has ended has just its tokens, or the first of them if it was not to end by itself."""
        for request_id, output in self.outputs.items():
            for index, sequence in enumerate(output.outputs):
                expected = expected_tokens(output.prompt_token_ids, self.params[request_id], index, self.engine.max_model_len)
                is_cut = sequence.finish_reason in (FinishReason.TIMEOUT, None)
                assert sequence.token_ids == (expected[: len(sequence.token_ids)] if is_cut else expected)

    def reason(self, request_id: str, index: int = 0) -> FinishReason | None:
        return self.outputs[request_id].outputs[index].finish_reason


def endless(max_tokens: int, **params: object) -> SamplingParams:
    """Just so many tokens, whatever they are, if no other reason to stop is given."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **params)  # type: ignore[arg-type]


@contextmanager
def recorded_chunks(engine: Engine) -> Iterator[list[Chunk]]:
    """The chunks that prefill starts meanwhile."""
    chunks: list[Chunk] = []
    scheduler = engine._components.prefill.scheduler
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
