"""DecodeWorker: scheduler and runner of the decode mesh. One step is always under way while the host reads the one before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch, empty_batch
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.decode.scheduler import DecodeScheduler, Preempt
from jaxinfer.request import TokenLogprob
from jaxinfer.runtime.buckets import bucket_for
from jaxinfer.sampling.params import SamplingRows, neutral_rows, set_row, uses_penalties
from jaxinfer.sampling.reading import read_logprob
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class _InFlight:
    sequences: list[Sequence]
    epochs: list[int]
    sampled: Sampled
    wants_logprobs: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """A sequence's next token."""

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None


class DecodeWorker:
    def __init__(self, scheduler: DecodeScheduler, runner: DecodeRunner) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._in_flight: deque[_InFlight] = deque()
        # One place a slot, kept up as sequences join and grow; a step takes its rows' places.
        self._slot_rows = neutral_rows(runner.num_slots)
        self._slot_pages = np.zeros((runner.num_slots, runner.table_width), np.int32)
        self._slot_num_pages = [0] * runner.num_slots
        # The rows of the last step: while the same sequences run, sampling parameters stay on the device.
        self._row_sequences: list[tuple[Sequence, int]] = []
        self._rows_on_device: SamplingRows | None = None
        self._wants_logprobs = False

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def join(self, sequence: Sequence) -> None:
        """Take over a sequence whose pages have been handed over and whose newest token is not in them yet."""
        self.scheduler.join(sequence)
        slot = sequence.slot
        blank = neutral_rows(1)
        for column, empty in zip(self._slot_rows, blank, strict=True):
            column[slot] = empty[0]
        set_row(self._slot_rows, slot, sequence.params, sequence.seed, sorted(sequence.end_tokens))
        self._slot_num_pages[slot] = 0
        if uses_penalties(sequence.params):
            self._runner.count_tokens(slot, sequence.token_ids, sequence.num_prompt)

    def launch(self, preempt: Preempt) -> bool:
        """Start the next step; False if no sequence can take one."""
        sequences = self.scheduler.schedule(preempt)
        if not sequences:
            return False
        batch = self._build_batch(sequences)
        sampled = self._runner.run(batch, self._device_rows(sequences, batch), self._wants_logprobs)
        self._in_flight.append(_InFlight(sequences, [s.epoch for s in sequences], sampled, self._wants_logprobs))
        for sequence in sequences:
            sequence.num_in_flight += 1
        return True

    def collect(self) -> list[Decoded]:
        """Wait for the oldest step under way and read its tokens."""
        step = self._in_flight.popleft()
        sampled = Sampled(*(np.asarray(a) for a in step.sampled)) if step.wants_logprobs else None
        tokens = np.asarray(step.sampled.tokens).tolist()
        decoded: list[Decoded] = []
        for row, (sequence, epoch) in enumerate(zip(step.sequences, step.epochs, strict=True)):
            if sequence.epoch != epoch or sequence.state is not SequenceState.RUNNING:
                continue  # finished, aborted or preempted while the step ran: its token is dropped, and sampled again if need be
            sequence.num_in_flight -= 1
            wants = sampled is not None and sequence.params.logprobs is not None
            logprob = read_logprob(sampled, row, sequence.params.logprobs) if wants else None  # type: ignore[arg-type]
            decoded.append(Decoded(sequence, tokens[row], logprob))
        return decoded

    def _build_batch(self, sequences: list[Sequence]) -> DecodeBatch:
        num_rows = len(sequences)
        batch = empty_batch(bucket_for(num_rows, self._runner.buckets), self._runner.num_slots, self._runner.table_width)
        for sequence in sequences:
            slot, known = sequence.slot, self._slot_num_pages[sequence.slot]
            pages = sequence.decode_pages
            if len(pages) > known:
                self._slot_pages[slot, known : len(pages)] = pages[known:]
                self._slot_num_pages[slot] = len(pages)
        slots = [s.slot for s in sequences]
        batch.slots[:num_rows] = slots
        # With a step under way the newest token is still on the device; otherwise the host has it.
        batch.tokens[:num_rows] = [ON_DEVICE if s.num_in_flight else s.token_ids[-1] for s in sequences]
        batch.positions[:num_rows] = [len(s.token_ids) - 1 + s.num_in_flight for s in sequences]
        batch.num_generated[:num_rows] = [s.num_output + s.num_in_flight for s in sequences]
        np.take(self._slot_pages, slots, axis=0, out=batch.page_table[:num_rows])
        return batch

    def _device_rows(self, sequences: list[Sequence], batch: DecodeBatch) -> SamplingRows:
        key = [(s, s.epoch) for s in sequences]
        if self._rows_on_device is None or key != self._row_sequences or len(self._rows_on_device.top_k) != len(batch.slots):
            rows = neutral_rows(len(batch.slots))
            slots = batch.slots[: len(sequences)]
            for column, of_slots in zip(rows, self._slot_rows, strict=True):
                column[: len(sequences)] = of_slots[slots]
            self._rows_on_device = self._runner.put(rows)
            self._row_sequences = key
            self._wants_logprobs = bool(rows.wants_logprobs.any())
        return self._rows_on_device
