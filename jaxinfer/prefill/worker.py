"""PrefillWorker: joins scheduler and runner of the prefill mesh, with the steps in flight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.prefill.batch import build_batch, grammars_for, sampling_of_forks
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.runner import PrefillResult, PrefillRunner
from jaxinfer.prefill.scheduler import Chunk, Fork, Preempt, PreemptForAdmission, PrefillScheduler
from jaxinfer.request import TokenLogprob
from jaxinfer.sampling.logprob_readback import read_logprob
from jaxinfer.sampling.params import uses_penalties
from jaxinfer.sequence import Sequence

_WAITING = 1  # steps queued beyond one a stage: no device idles, and an abort finds few of them


@dataclass(frozen=True, slots=True)
class _InFlightPrefill:
    chunks: list[Chunk]
    starts: list[int]  # offset of each chunk in the packed tokens
    bucket: int  # tokens; 0: forks, which compute no prompt
    result: PrefillResult
    launched_at: float  # seconds, of the mesh's clock


class Prefilled(NamedTuple):
    """A sequence whose prompt is computed, and its next token."""

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None


class PrefillWorker:
    def __init__(
        self, scheduler: PrefillScheduler, runner: PrefillRunner, clock: DeviceClock, chunk_controller: ChunkSizeController
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self.chunk_controller = chunk_controller
        self._in_flight: deque[_InFlightPrefill] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def launch(
        self, budget: int, num_free_slots: int, reserved_pages: int, preempt_for_admission: PreemptForAdmission, preempt: Preempt
    ) -> list[Chunk]:
        """Start the next step, unless there is none or enough are in flight; returns its chunks. See
        `PrefillScheduler.schedule`."""
        if len(self._in_flight) >= self.runner.num_stages + _WAITING:
            return []
        chunks = self.scheduler.schedule(budget, num_free_slots, reserved_pages, preempt_for_admission, preempt)
        if computed := [chunk for chunk in chunks if not isinstance(chunk, Fork)]:
            self._compute(computed)
        for _, forks in groupby((chunk for chunk in chunks if isinstance(chunk, Fork)), key=lambda fork: fork.sequence.prefill.leader):
            siblings = list(forks)
            for start in range(0, len(siblings), self.runner.num_rows):
                self._fork(siblings[start : start + self.runner.num_rows])
        return chunks

    def _compute(self, chunks: list[Chunk]) -> None:
        bucket = self.scheduler.bucket(chunks)
        batch = build_batch(chunks, bucket, self.runner.table_width)
        self._count_tokens(chunks)
        starts = [int(start) for start in batch.packed.query_start[: len(chunks)]]
        launched_at = self._clock.now()
        self._in_flight.append(_InFlightPrefill(chunks, starts, bucket, self.runner.run(batch), launched_at))
        self.scheduler.launched(chunks)

    def _fork(self, forks: list[Fork]) -> None:
        """Sample the first tokens of sequences that share a prompt."""
        self._count_tokens(forks)
        launched_at = self._clock.now()
        sampled = self.runner.sample(forks[0].last_hidden, sampling_of_forks(forks, self.runner.num_rows), grammars_for(forks))
        self._in_flight.append(
            _InFlightPrefill(list(forks), [0] * len(forks), 0, PrefillResult(sampled, None, forks[0].last_hidden), launched_at)
        )

    def _count_tokens(self, chunks: Iterable[Chunk]) -> None:
        for row, chunk in enumerate(chunks):
            if chunk.is_last and uses_penalties(chunk.sequence.params):
                self.runner.count_tokens(row, chunk.sequence.token_ids, chunk.sequence.num_prompt)

    def collect(self, *, wait: int, until: float = math.inf) -> list[Prefilled]:
        """Read the steps that have ended, and wait for the `wait` oldest; only those launched before `until`."""
        prefilled: list[Prefilled] = []
        while self._in_flight:
            oldest = self._in_flight[0]
            if oldest.launched_at >= until or not (wait > 0 or oldest.result.sampled.packed.is_ready()):
                break
            prefilled += self._read(self._in_flight.popleft())
            wait -= 1
        return prefilled

    def _read(self, step: _InFlightPrefill) -> list[Prefilled]:
        sampled = type(step.result.sampled)(np.asarray(step.result.sampled.packed))
        seconds = self._clock.ended(step.launched_at)
        if step.bucket:
            self.chunk_controller.observe(step.bucket, seconds)
        self._meter(step.chunks, seconds)
        prefilled: list[Prefilled] = []
        for row, (chunk, start) in enumerate(zip(step.chunks, step.starts, strict=True)):
            sequence = chunk.sequence
            if not chunk.is_current:  # aborted, or preempted: its prefill starts again
                continue
            if step.result.prompt_scores is not None and sequence.needs_prompt_scores:
                self._read_prompt_scores(step.result, chunk, start)
            if chunk.is_last:
                self.scheduler.done(sequence, partial(self.runner.repeat, step.result.last_hidden, row))
                logprob = None if sequence.params.logprobs is None else read_logprob(sampled, row, sequence.params)
                prefilled.append(Prefilled(sequence, int(sampled.tokens[row]), logprob))
        return prefilled

    def _meter(self, chunks: list[Chunk], seconds: float) -> None:
        shares = [chunk.length or 1 for chunk in chunks]  # forks of a step share its time equally
        for chunk, share in zip(chunks, shares, strict=True):
            chunk.sequence.meter.prefill_seconds += seconds * share / sum(shares)

    def _read_prompt_scores(self, result: PrefillResult, chunk: Chunk, start: int) -> None:
        sequence, scores = chunk.sequence, result.prompt_scores
        assert scores is not None and sequence.params.prompt_logprobs is not None
        logprobs, top_tokens, top_logprobs = (np.asarray(a) for a in scores)
        if chunk.start == 0:
            sequence.prefill.prompt_logprobs = [None]
        # The successor of the last prompt token is not in the prompt.
        num_scored = min(chunk.length, sequence.num_prompt - 1 - chunk.start)
        for i in range(start, start + num_scored):
            token_id = sequence.token_ids[chunk.start + i - start + 1]
            likeliest = top_tokens[i].tolist()
            top = tuple(zip(likeliest, top_logprobs[i].tolist(), strict=True))[: sequence.params.prompt_logprobs]
            rank = likeliest.index(token_id) + 1 if token_id in likeliest else None
            sequence.prefill.prompt_logprobs.append(TokenLogprob(token_id, float(logprobs[i]), top, rank))
