"""EncodeWorker: an encoder's queue and runner, with the batches under way between them."""

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
from jaxinfer.request import DeviceUsage
from jaxinfer.runtime.compilation import COUNTER
from jaxinfer.runtime.device_clock import DeviceClock
from jaxinfer.stats import EngineStats

_MOST_IN_FLIGHT = 2  # one that runs and one that waits for it


@dataclass(frozen=True, slots=True)
class _InFlight:
    texts: list[JobText]
    result: Any  # float32 [S, D], on its way to the host
    launched_at: float  # seconds, of the mesh's clock


class EncodeWorker:
    """`reader` is anyone's; all else belongs to the thread that steps."""

    def __init__(
        self, reader: TextReader, queue: EncodeQueue, runner: EncodeRunner, pooling: str, clock: DeviceClock, stats: EngineStats
    ) -> None:
        self.reader = reader
        self._queue, self._runner, self._pooling = queue, runner, pooling
        self._clock, self._stats = clock, stats
        self._jobs: dict[str, EncodeJob] = {}
        self._in_flight: deque[_InFlight] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._in_flight)

    def add(self, request_id: str, token_lists: Sequence[TokenIds]) -> None:
        """Queue a request's texts, as `reader` has read them."""
        assert request_id not in self._jobs, "request ids are unique"
        embeddings = np.empty((len(token_lists), self.reader.embedding_size), np.float32)
        job = self._jobs[request_id] = EncodeJob(request_id, token_lists, embeddings, self._clock.now())
        self._queue.add(job)

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if there is none of that id (any more). What is under way of it runs to its end for nobody."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._queue.remove(job)
        return job is not None

    def step(self, *, wait: bool = True, most_in_flight: int = _MOST_IN_FLIGHT) -> list[Embedded]:
        """One turn: read the oldest batch under way, with `wait` whether it has ended or not, then start others until so many are. Two
        keep the devices busy: one runs and one waits for it there. Returns the requests that are done."""
        unexpected = COUNTER.num_unexpected_compilations
        done: list[Embedded] = []
        if self._in_flight and (wait or self._in_flight[0].result.is_ready()):
            done = self._read(self._in_flight.popleft())
        while len(self._in_flight) < most_in_flight and (taken := self._queue.take()):
            (num_rows, width), rows = taken
            rows_of_tokens = [[job.token_lists[number] for job, number in row] for row in rows]
            batch = build_batch(rows_of_tokens, num_rows, width, self._pooling)
            texts, launched_at = [text for row in rows for text in row], self._clock.now()
            self._in_flight.append(_InFlight(texts, self._runner.run(batch), launched_at))
            for job, _ in texts:
                job.first_launch = launched_at if job.first_launch is None else job.first_launch
        self._stats.num_compilations_after_ready += COUNTER.num_unexpected_compilations - unexpected
        return done

    def _read(self, batch: _InFlight) -> list[Embedded]:
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
            if not job.num_left and self._jobs.get(job.request_id) is job:  # else it was aborted
                del self._jobs[job.request_id]
                assert job.first_launch is not None
                usage = DeviceUsage(job.first_launch - job.arrival_time, job.device_seconds, 0.0)
                done.append(Embedded(job.request_id, job.embeddings, usage))
        return done
