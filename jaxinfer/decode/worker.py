"""DecodeWorker: joins scheduler and runner of the decode mesh. One step, or one of each micro-batch of a pipeline, is
always in flight while the host reads the one before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jaxinfer.decode.batch import ON_DEVICE, PAGES, BatchIncrements, DecodeBatch, empty_batch, increments_of
from jaxinfer.decode.runner import DecodeRunner, LaunchedForward
from jaxinfer.decode.scheduler import DecodeScheduler, Preempt
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.programs.buckets import bucket_for
from jaxinfer.request import TokenLogprob
from jaxinfer.sampling.bad_words import Ban, bans_before_newest
from jaxinfer.sampling.logprob_readback import read_logprob
from jaxinfer.sampling.params import SamplingRows, neutral_rows, set_row, uses_penalties
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sequence import Sequence, SequenceState
from jaxinfer.structured.grammars import Grammar, masks_for


@dataclass(slots=True)
class _Rows:
    """The rows of a micro-batch's last step. While the same sequences run, their sampling parameters stay on the device
    and only positions change."""

    sequences: list[Sequence]
    epochs: list[int]
    batch: DecodeBatch
    increments: BatchIncrements
    sampling: SamplingRows | None  # what the runner put on the device
    wants_logprobs: bool
    has_grammars: bool
    micro_batch: int
    num_in_flight: int = 0  # steps
    is_steady: bool = False  # after the first step


@dataclass(slots=True)
class _InFlightDecode:
    rows: _Rows
    launched: Sampled | LaunchedForward  # the latter until the masks of its rows are known
    launched_at: float  # seconds, of the mesh's clock


Decoded = tuple[Sequence, int, TokenLogprob | None]  # a sequence's next token


class DecodeWorker:
    """`launch` alternates between micro-batches, so steps end in the order of their launches."""

    def __init__(self, scheduler: DecodeScheduler, runner: DecodeRunner, clock: DeviceClock) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self.step_seconds = 0.0  # of the last step
        self._in_flight: deque[_InFlightDecode] = deque()
        # One row a slot, set as sequences join; a step takes its slots' rows.
        self._slot_rows = neutral_rows(runner.num_micro_batches * runner.num_slots)
        self._rows: list[_Rows | None] = [None] * runner.num_micro_batches
        self._micro_batch = 0  # launched last
        self._bans: dict[int, list[Ban]] = {}  # by slot, in its row
        self._num_unsampled = 0  # steps in flight whose sampling was not started
        self._num_with_history = 0  # running sequences whose bans change from token to token

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_steady(self) -> bool:
        """Whether each micro-batch's last step had the same rows as the one before it, and since then none of them has
        left or got a page."""
        return not self.scheduler.grown and all(rows is not None and rows.is_steady for rows in self._rows)

    @property
    def depth(self) -> int:
        """Steps to have in flight so that no stage waits: one of each micro-batch with sequences."""
        return max(self.scheduler.num_active_micro_batches, 1)

    @property
    def oldest_launch(self) -> float:
        """Launch time of the oldest step in flight, in seconds of the mesh's clock."""
        return self._in_flight[0].launched_at

    def leave(self, sequence: Sequence) -> None:
        """Take a running sequence out of the batch."""
        # It may come back before the next step, in another slot and with a token that the device does not have.
        self._rows[self.scheduler.micro_batch(sequence)] = None
        self._num_with_history -= sequence.needs_history
        self.scheduler.leave(sequence)

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Forget a running sequence's last tokens. Its row is composed anew, with its newest token from the host."""
        self.scheduler.roll_back(sequence, num_tokens)
        self._rows[self.scheduler.micro_batch(sequence)] = None
        # The slot's page table stays: a step brings the block that it writes, and reads none after it.
        if uses_penalties(sequence.params):
            self.runner.count_tokens(sequence.decode.slot, sequence.token_ids, sequence.num_prompt)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence whose pages were handed over; its newest token is not in them yet."""
        self.scheduler.join(sequence)
        slot = sequence.decode.slot
        self._rows[self.scheduler.micro_batch(sequence)] = None
        self._num_with_history += sequence.needs_history
        self._set_row(sequence, self._bans_for(sequence))
        self.runner.assign_slot(slot, sequence.decode.pages)
        if uses_penalties(sequence.params):
            self.runner.count_tokens(slot, sequence.token_ids, sequence.num_prompt)

    def launch(self, preempt: Preempt) -> bool:
        """Start the next micro-batch's step; False if no sequence can take one."""
        num_micro_batches = self.runner.num_micro_batches
        for _ in range(num_micro_batches):
            self._micro_batch = (self._micro_batch + 1) % num_micro_batches
            if self._num_unsampled and self._is_unsampled(self._micro_batch):  # its next step takes what that gives
                continue
            if sequences := self.scheduler.schedule(preempt, self._micro_batch):
                break
        else:
            return False
        if self._num_with_history:
            self._update_bans(sequences)
        rows = self._next_rows(sequences)
        launched_at = self._clock.now()
        launched: Sampled | LaunchedForward
        if rows.has_grammars:
            launched = self.runner.forward(rows.batch, rows.micro_batch)
            self._num_unsampled += 1
        else:
            launched = self.runner.run(rows.batch, rows.sampling, rows.micro_batch)
        self._in_flight.append(_InFlightDecode(rows, launched, launched_at))
        rows.num_in_flight += 1
        for sequence in sequences:
            sequence.decode.num_in_flight += 1
        self.sample_launched()
        return True

    def sample_launched(self) -> None:
        """Start the sampling of steps whose masks are known by now: those of a micro-batch whose step before was read,
        and its tokens accepted by the grammars. Meanwhile the device computes the step."""
        if not self._num_unsampled:
            return
        before: set[int] = set()
        for step in self._in_flight:
            micro_batch = step.rows.micro_batch
            if isinstance(step.launched, LaunchedForward) and micro_batch not in before:
                step.launched = self.runner.sample(step.launched, step.rows.sampling, self._masks(step.rows))
                self._num_unsampled -= 1
            before.add(micro_batch)

    def _masks(self, rows: _Rows) -> Int32[np.ndarray, "B W"]:
        grammars: list[Grammar | None] = [None] * len(rows.sequences)
        for row in self._current(rows):
            grammars[row] = rows.sequences[row].grammar
        return masks_for(grammars, len(rows.batch.slots), self.runner.mask_words)

    def _is_unsampled(self, micro_batch: int) -> bool:
        return any(isinstance(step.launched, LaunchedForward) and step.rows.micro_batch == micro_batch for step in self._in_flight)

    def _bans_for(self, sequence: Sequence) -> list[Ban]:
        """Bans for its next step. That step's input token is still on the device if a step is in flight; otherwise the
        host has it."""
        num_before = len(sequence.token_ids) - (not sequence.decode.num_in_flight)
        return bans_before_newest(sequence.bad_words, sequence.token_ids, sequence.num_prompt, num_before)

    def _update_bans(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.needs_history and (bans := self._bans_for(sequence)) != self._bans[sequence.decode.slot]:
                self._set_row(sequence, bans)
                self._rows[self._micro_batch] = None

    def _set_row(self, sequence: Sequence, bans: list[Ban]) -> None:
        self._bans[sequence.decode.slot] = bans
        set_row(self._slot_rows, sequence.decode.slot, sequence.params, sequence.seed, sorted(sequence.end_tokens), bans)

    def collect(self) -> list[Decoded]:
        """Wait for the oldest step in flight and read its tokens."""
        step = self._in_flight.popleft()
        step.rows.num_in_flight -= 1
        assert isinstance(step.launched, Sampled), "nothing is before the oldest step, so its sampling was started"
        sampled = Sampled(np.asarray(step.launched.packed))
        tokens = sampled.tokens.tolist()
        self.step_seconds = self._clock.ended(step.launched_at)
        current = self._current(step.rows)
        share = self.step_seconds / max(len(current), 1)  # sequences that get a token pay for dropped rows too
        decoded: list[Decoded] = []
        for row in current:
            sequence = step.rows.sequences[row]
            sequence.decode.num_in_flight -= 1
            sequence.meter.decode_seconds += share
            logprob = None
            if step.rows.wants_logprobs and sequence.params.logprobs is not None:
                logprob = read_logprob(sampled, row, sequence.params)
            decoded.append((sequence, tokens[row], logprob))
        return decoded

    def _current(self, rows: _Rows) -> range | list[int]:
        """Rows whose sequences were not finished, aborted or preempted while the step ran. Tokens of other rows are
        dropped, and sampled again if needed."""
        if rows is self._rows[rows.micro_batch]:  # no sequence has left since
            return range(len(rows.sequences))
        each = enumerate(zip(rows.sequences, rows.epochs, strict=True))
        return [row for row, (sequence, epoch) in each if sequence.epoch == epoch and sequence.state is SequenceState.RUNNING]

    def _next_rows(self, sequences: list[Sequence]) -> _Rows:
        rows = self._rows[self._micro_batch]
        # The same sequences, and the micro-batch's step in flight has these rows: each row's input is the token that it
        # samples.
        if rows is not None and rows.sequences == sequences and rows.num_in_flight:
            # A new array, because the device may still read the old one.
            rows.batch = DecodeBatch(rows.batch.packed + (rows.increments.later if rows.is_steady else rows.increments.first))
            rows.is_steady = True
            for row in self.scheduler.grown:
                rows.batch.packed[row, PAGES:] = sequences[row].decode.pages[-self.runner.num_groups :]
            return rows
        self._rows[self._micro_batch] = rows = self._compose(sequences)
        return rows

    def _compose(self, sequences: list[Sequence]) -> _Rows:
        num_rows = len(sequences)
        batch = empty_batch(bucket_for(num_rows, self.runner.buckets), self.runner.num_slots, self.runner.num_groups)
        slots = [s.decode.slot for s in sequences]
        batch.slots[:num_rows] = [slot - self._micro_batch * self.runner.num_slots for slot in slots]
        # With a step in flight the newest token is still on the device; otherwise the host has it.
        batch.tokens[:num_rows] = [ON_DEVICE if s.decode.num_in_flight else s.token_ids[-1] for s in sequences]
        batch.positions[:num_rows] = [len(s.token_ids) - 1 + s.decode.num_in_flight for s in sequences]
        batch.num_generated[:num_rows] = [s.num_output + s.decode.num_in_flight for s in sequences]
        batch.pages[:num_rows] = [s.decode.pages[-self.runner.num_groups :] for s in sequences]
        sampling = neutral_rows(len(batch.slots))
        sampling.packed[:num_rows] = self._slot_rows.packed[slots]
        increments = increments_of(batch, num_rows)
        epochs, wants_logprobs = [s.epoch for s in sequences], bool(sampling.wants_logprobs.any())
        has_grammars = any(s.grammar is not None for s in sequences)
        on_device = self.runner.put(sampling, batch.num_generated, has_masks=has_grammars)
        return _Rows(sequences, epochs, batch, increments, on_device, wants_logprobs, has_grammars, self._micro_batch)
