"""DecodeWorker: scheduler and runner of the decode mesh. One step, or one of each lane of a pipeline, is always under way while the host reads the
one before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxinfer.decode.batch import ON_DEVICE, PAGES, DecodeBatch, Steps, empty_batch, steps_of
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.decode.scheduler import DecodeScheduler, Preempt
from jaxinfer.request import TokenLogprob
from jaxinfer.runtime.buckets import bucket_for
from jaxinfer.runtime.device_clock import DeviceClock
from jaxinfer.sampling.bad_words import Ban, bans_before_newest
from jaxinfer.sampling.logprob_readback import read_logprob
from jaxinfer.sampling.params import SamplingRows, neutral_rows, set_row, uses_penalties
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sequence import Sequence, SequenceState


@dataclass(slots=True)
class _Rows:
    """The rows of the last step. While the same sequences run, their sampling parameters stay on the device and only positions move."""

    sequences: list[Sequence]
    epochs: list[int]
    batch: DecodeBatch
    steps: Steps
    sampling: SamplingRows | None  # what the runner put on the device
    wants_logprobs: bool
    lane: int
    num_in_flight: int = 0  # steps
    is_steady: bool = False  # after the first step


@dataclass(frozen=True, slots=True)
class _InFlight:
    rows: _Rows
    sampled: Sampled
    launched_at: float  # seconds, of the mesh's clock


Decoded = tuple[Sequence, int, TokenLogprob | None]  # a sequence's next token


class DecodeWorker:
    """`launch` takes lanes in turn, so steps end in the order in which they were launched."""

    def __init__(self, scheduler: DecodeScheduler, runner: DecodeRunner, clock: DeviceClock) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self.step_seconds = 0.0  # that the last step took
        self._in_flight: deque[_InFlight] = deque()
        # One place a slot, filled as sequences join; a step takes its rows' places.
        self._slot_rows = neutral_rows(runner.num_lanes * runner.num_slots)
        self._rows: list[_Rows | None] = [None] * runner.num_lanes
        self._lane = 0  # launched last
        self._bans: dict[int, list[Ban]] = {}  # by slot, that its row has
        self._num_with_history = 0  # running sequences whose bans change from token to token

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_steady(self) -> bool:
        """Whether each lane's last step had the rows of the one before it, none of them has left since, and none got a page."""
        return not self.scheduler.grown and all(rows is not None and rows.is_steady for rows in self._rows)

    @property
    def depth(self) -> int:
        """Steps that have to be under way for no stage to wait: one of each lane that has sequences."""
        return max(self.scheduler.num_active_lanes, 1)

    @property
    def oldest_launch(self) -> float:
        """When the oldest step under way was launched, in seconds of the mesh's clock."""
        return self._in_flight[0].launched_at

    def leave(self, sequence: Sequence) -> None:
        """Take a running sequence out of the batch."""
        # It may come back before the next step, in another slot and with a token that the device does not have.
        self._rows[self.scheduler.lane(sequence)] = None
        self._num_with_history -= sequence.needs_history
        self.scheduler.leave(sequence)

    def join(self, sequence: Sequence) -> None:
        """Take over a sequence whose pages have been handed over and whose newest token is not in them yet."""
        self.scheduler.join(sequence)
        slot = sequence.slot
        self._rows[self.scheduler.lane(sequence)] = None
        self._num_with_history += sequence.needs_history
        self._set_row(sequence, self._bans_for(sequence))
        self._runner.assign_slot(slot, sequence.decode_pages)
        if uses_penalties(sequence.params):
            self._runner.count_tokens(slot, sequence.token_ids, sequence.num_prompt)

    def launch(self, preempt: Preempt) -> bool:
        """Start the next step, of the lane whose turn it is; False if no sequence can take one."""
        num_lanes = self._runner.num_lanes
        for _ in range(num_lanes):
            self._lane = (self._lane + 1) % num_lanes
            if sequences := self.scheduler.schedule(preempt, self._lane):
                break
        else:
            return False
        if self._num_with_history:
            self._update_bans(sequences)
        rows = self._next_rows(sequences)
        launched_at = self._clock.now()
        sampled = self._runner.run(rows.batch, rows.sampling, rows.lane)
        self._in_flight.append(_InFlight(rows, sampled, launched_at))
        rows.num_in_flight += 1
        for sequence in sequences:
            sequence.num_in_flight += 1
        return True

    def _bans_for(self, sequence: Sequence) -> list[Ban]:
        """For its next step. The token that it feeds is still on the device if a step is under way, else the host has it."""
        num_before = len(sequence.token_ids) - (not sequence.num_in_flight)
        return bans_before_newest(sequence.bad_words, sequence.token_ids, sequence.num_prompt, num_before)

    def _update_bans(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.needs_history and (bans := self._bans_for(sequence)) != self._bans[sequence.slot]:
                self._set_row(sequence, bans)
                self._rows[self._lane] = None

    def _set_row(self, sequence: Sequence, bans: list[Ban]) -> None:
        self._bans[sequence.slot] = bans
        set_row(self._slot_rows, sequence.slot, sequence.params, sequence.seed, sorted(sequence.end_tokens), bans)

    def collect(self) -> list[Decoded]:
        """Wait for the oldest step under way and read its tokens."""
        step = self._in_flight.popleft()
        step.rows.num_in_flight -= 1
        sampled = Sampled(np.asarray(step.sampled.packed))
        tokens = sampled.tokens.tolist()
        self.step_seconds = self._clock.ended(step.launched_at)
        current = self._current(step.rows)
        share = self.step_seconds / max(len(current), 1)  # who gets a token pays, for rows that are dropped too
        decoded: list[Decoded] = []
        for row in current:
            sequence = step.rows.sequences[row]
            sequence.num_in_flight -= 1
            sequence.meter.decode_seconds += share
            logprob = None
            if step.rows.wants_logprobs and sequence.params.logprobs is not None:
                logprob = read_logprob(sampled, row, sequence.params)
            decoded.append((sequence, tokens[row], logprob))
        return decoded

    def _current(self, rows: _Rows) -> range | list[int]:
        """The rows whose sequences were not finished, aborted or preempted while the step ran: what it sampled for those is dropped, and
        sampled again if need be."""
        if rows is self._rows[rows.lane]:  # nobody has left since
            return range(len(rows.sequences))
        each = enumerate(zip(rows.sequences, rows.epochs, strict=True))
        return [row for row, (sequence, epoch) in each if sequence.epoch == epoch and sequence.state is SequenceState.RUNNING]

    def _next_rows(self, sequences: list[Sequence]) -> _Rows:
        rows = self._rows[self._lane]
        # Nobody has left since, nobody has come, and the lane's step under way is these rows': each feeds what that one samples.
        if rows is not None and rows.sequences == sequences and rows.num_in_flight:
            # A new array, for the device may still be reading the old one.
            rows.batch = DecodeBatch(rows.batch.packed + (rows.steps.later if rows.is_steady else rows.steps.first))
            rows.is_steady = True
            for row in self.scheduler.grown:
                rows.batch.packed[row, PAGES:] = sequences[row].decode_pages[-self._runner.num_groups :]
            return rows
        self._rows[self._lane] = rows = self._compose(sequences)
        return rows

    def _compose(self, sequences: list[Sequence]) -> _Rows:
        num_rows = len(sequences)
        batch = empty_batch(bucket_for(num_rows, self._runner.buckets), self._runner.num_slots, self._runner.num_groups)
        slots = [s.slot for s in sequences]
        batch.slots[:num_rows] = [slot - self._lane * self._runner.num_slots for slot in slots]
        # With a step under way the newest token is still on the device; otherwise the host has it.
        batch.tokens[:num_rows] = [ON_DEVICE if s.num_in_flight else s.token_ids[-1] for s in sequences]
        batch.positions[:num_rows] = [len(s.token_ids) - 1 + s.num_in_flight for s in sequences]
        batch.num_generated[:num_rows] = [s.num_output + s.num_in_flight for s in sequences]
        batch.pages[:num_rows] = [s.decode_pages[-self._runner.num_groups :] for s in sequences]
        sampling = neutral_rows(len(batch.slots))
        sampling.packed[:num_rows] = self._slot_rows.packed[slots]
        steps = steps_of(batch, num_rows)
        epochs, wants_logprobs = [s.epoch for s in sequences], bool(sampling.wants_logprobs.any())
        return _Rows(sequences, epochs, batch, steps, self._runner.put(sampling, batch.num_generated), wants_logprobs, self._lane)
