"""EncodeWorker: joins an encoder's queue and runner, with the batches in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.encode.batch import build_batch
from jaxinfer.encode.queue import EncodeJob, EncodeQueue, JobText
from jaxinfer.encode.runner import EncodeRunner
from jaxinfer.encode.text_batching import Embedded, TextReader, TokenIds
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.programs.compilation import COUNTER
from jaxinfer.request import DeviceUsage
from jaxinfer.stats import EngineStats

_MOST_IN_FLIGHT = 2  # one that runs, one queued on the device


@dataclass(frozen=True, slots=True)
class _InFlightBatch:
    texts: list[JobText]
    result: Any  # float32 [S, D], on its way to the host
    launched_at: float  # seconds, of the mesh's clock


class EncodeWorker:
    """Any thread may use `reader`; everything else belongs to the thread that calls `step`."""

    def __init__(
        self, reader: TextReader, queue: EncodeQueue, runner: EncodeRunner, pooling: str, clock: DeviceClock, stats: EngineStats
    ) -> None:
        self.reader = reader
        self._queue, self._runner, self._pooling = queue, runner, pooling
        self._clock, self._stats = clock, stats
        self._jobs: dict[str, EncodeJob] = {}
        self._in_flight: deque[_InFlightBatch] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._in_flight)

    def add(self, request_id: str, token_lists: Sequence[TokenIds]) -> None:
        """Queue a request's texts, as token ids from `reader`."""
        assert request_id not in self._jobs, "request ids are unique"
        embeddings = np.empty((len(token_lists), self.reader.embedding_size), np.float32)
        job = self._jobs[request_id] = EncodeJob(request_id, token_lists, embeddings, self._clock.now())
        self._queue.add(job)

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if no request has this id. Its batches in flight run to their end."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._queue.remove(job)
        return job is not None

    def step(self, *, wait: bool = True, most_in_flight: int = _MOST_IN_FLIGHT) -> list[Embedded]:
        """Read the oldest batch in flight if it has ended, with `wait` in any case; then launch batches up to
        `most_in_flight`. With two, the device is always busy: one runs while the next is queued. Returns finished
        requests."""
        unexpected = COUNTER.num_unexpected_compilations
        done: list[Embedded] = []
        if self._in_flight and (wait or self._in_flight[0].result.is_ready()):
            done = self._read(self._in_flight.popleft())
        while len(self._in_flight) < most_in_flight and (taken := self._queue.take()):
            (num_rows, width), rows = taken
            rows_of_tokens = [[job.token_lists[number] for job, number in row] for row in rows]
            batch = build_batch(rows_of_tokens, num_rows, width, self._pooling)
            texts, launched_at = [text for row in rows for text in row], self._clock.now()
            self._in_flight.append(_InFlightBatch(texts, self._runner.run(batch), launched_at))
            for job, _ in texts:
                job.first_launch = launched_at if job.first_launch is None else job.first_launch
        self._stats.num_compilations_after_ready += COUNTER.num_unexpected_compilations - unexpected
        return done

    def _read(self, batch: _InFlightBatch) -> list[Embedded]:
        embeddings = np.asarray(batch.result)
        seconds = self._clock.ended(batch.launched_at)
        num_tokens = sum(len(job.token_lists[number]) for job, number in batch.texts)
        self._stats.num_embedded_texts += len(batch.texts)
        self._stats.num_embedded_tokens += num_tokens
        done = []
        for embedding, (job, number) in zip(embeddings, batch.texts, strict=False):  # the rest is padding
            job.embeddings[number] = embedding
            job.device_seconds += seconds * len(job.token_lists[number]) / num_tokens
            job.num_left -= 1
            if not job.num_left and self._jobs.get(job.request_id) is job:  # otherwise it was aborted
                del self._jobs[job.request_id]
                assert job.first_launch is not None
                usage = DeviceUsage(job.first_launch - job.arrival_time, job.device_seconds, 0.0)
                done.append(Embedded(job.request_id, job.embeddings, usage))
        return done
