"""Which prompt tokens the next prefill step computes. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.prefill.shared_prompts import SharedPrompts
from jaxinfer.programs.buckets import QUERY_TILE, prefill_rows
from jaxinfer.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in a prefill step."""

    sequence: Sequence
    start: int
    length: int
    is_last: bool  # the step samples the sequence's next token
    epoch: int  # of the sequence when the step was planned

    @property
    def is_current(self) -> bool:
        return self.sequence.state is SequenceState.PREFILLING and self.sequence.epoch == self.epoch


@dataclass(frozen=True, slots=True)
class Fork(Chunk):
    """A sequence that forks its leader's prompt: it computes no tokens, and its first token is sampled from the
    prompt's last hidden state."""

    last_hidden: Any  # on the device


# A fork's cost in a step's budget: it runs the output head and no layer.
FORK_TOKENS = 8

# Preempts a sequence that is less urgent than this one, which waits: a running one, or one of these, which this step
# leaves out so far; False if there is none.
PreemptForAdmission = Callable[[Sequence, list[Sequence]], bool]


# Preempts what is served after this admitted sequence, which lacks pages to go on: a running one, or one of these;
# False if there is none.
Preempt = Callable[[Sequence, list[Sequence]], bool]


def _nobody(sequence: Sequence, left_out: list[Sequence]) -> bool:
    return False


# Fills a sequence's page table with what another mesh has of its tokens; see
# `kv_transfer.cross_mesh.PrefixRecall.fill`.
Recall = Callable[[Sequence, list[int], int], int]


# Starts to copy pages to others: of these numbers, to those.
CopyPages = Callable[[list[int], list[int]], None]


class LowerTiers(Protocol):
    """Where pages may be that the mesh has no more; see `kv_transfer.tiers.TierTransfer`."""

    def begin(self, sequence: Sequence) -> bool: ...

    def begin_again(self, sequence: Sequence) -> bool: ...

    def forget(self, sequence: Sequence) -> None: ...

    def poll(self, timeout: float) -> list[Sequence]: ...

    def fill(self, sequence: Sequence, table: list[int], num_cached: int) -> int: ...


class PrefillScheduler:
    """Chunks of prompts under a token budget, the most urgent first. A sequence gets pages for all its tokens when it
    is admitted, so that a prompt half computed never waits for pages; those of a cached prefix come filled."""

    def __init__(self, manager: KVManager, queue: WaitingQueue, buckets: tuple[int, ...]) -> None:
        self._manager = manager
        self.buckets = buckets  # of tokens, of programs that are there; the last stays
        self.queue = queue
        self.tiers: LowerTiers | None = None
        self.recall: Recall | None = None
        self.copy_pages: CopyPages = lambda source_ids, target_ids: None
        self._fetching: set[Sequence] = set()  # sequences that wait for their pages from the tiers, not yet queued
        self._held: dict[Sequence, list[Sequence]] = {}  # by leader: siblings that wait for its prompt to be computed
        self._shared = SharedPrompts(manager)
        self.prefilling: list[Sequence] = []  # admitted: they hold pages, and some of their tokens are not in them yet

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without pages, oldest first."""
        return sorted([*self.queue, *self._fetching, *(s for held in self._held.values() for s in held)], key=lambda s: s.order)

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self._fetching) + sum(map(len, self._held.values()))

    @property
    def has_waiting(self) -> bool:
        return bool(self.queue or self._fetching or self._held)

    def backlog(self) -> list[tuple[int, float]]:
        """For each prompt without its first token, about in scheduling order: the tokens still to compute (in whole
        tiles, cached prefixes included) and its arrival time."""
        ahead = (*sorted(self.prefilling, key=lambda s: s.scheduling_order), *self.queue)
        left = [
            (s.num_prompt - s.prefill.num_computed, s.request.arrival_time) for s in ahead if not s.num_output and not self._shared.has(s)
        ]
        return [(-(-num_tokens // QUERY_TILE) * QUERY_TILE, arrival_time) for num_tokens, arrival_time in left if num_tokens]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, or one that was preempted."""
        leader = sequence.prefill.leader
        if leader is not None and leader.state in (SequenceState.WAITING, SequenceState.PREFILLING) and not leader.num_output:
            self._held.setdefault(leader, []).append(sequence)
        else:
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if self.tiers is not None and self.tiers.begin(sequence):
            self._fetching.add(sequence)
        else:
            self.queue.add(sequence)

    def poll_tiers(self, timeout: float) -> None:
        """Queue the sequences whose pages have come from the tiers; with none there yet, wait for one for so many
        seconds."""
        if self.tiers is not None:
            for sequence in self._fetching.intersection(self.tiers.poll(timeout)):
                self._fetching.remove(sequence)
                self.queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give its prefill pages back; steps under way may still write to them, before any new
        owner does."""
        if sequence.state is SequenceState.WAITING:
            held = self._held.get(sequence.prefill.leader, []) if sequence.prefill.leader is not None else []
            if sequence in held:
                held.remove(sequence)
            elif sequence in self._fetching:
                self._fetching.remove(sequence)
            else:
                self.queue.remove(sequence)
            self._shared.leave(sequence)  # one that waits for pages of the tiers may have been queued before
            if self.tiers is not None:
                self.tiers.forget(sequence)
        elif sequence.state is SequenceState.PREFILLING:
            self.prefilling.remove(sequence)
        self._held = {leader: held for leader, held in self._held.items() if held}
        if sequence.prefill.pages:
            self._manager.insert(sequence.prefill.pages, sequence, sequence.prefill.num_computed)
            self._manager.free(sequence.prefill.pages)

    def launched(self, chunks: list[Chunk]) -> None:
        """A step that computes these chunks was started: prompts that end with it may be found by the steps after it,
        which run after it."""
        for chunk in chunks:
            if chunk.is_last:
                sequence = chunk.sequence
                self._manager.insert(sequence.prefill.pages, sequence, sequence.prefill.num_computed)

    def done(self, sequence: Sequence, last_hidden: Callable[[], Any]) -> None:
        """All of a sequence's tokens are in its pages. `last_hidden`, which is called if siblings wait for its
        prompt, gives what they sample their first tokens from."""
        self.prefilling.remove(sequence)
        sequence.state = SequenceState.PREFILLED
        self._manager.release_outside_window(sequence.prefill.pages, sequence.prefill.num_computed)
        siblings = self._held.pop(sequence, [])
        if siblings:
            self._shared.add(sequence, siblings, last_hidden())
        for sibling in siblings:
            self.queue.add(sibling)

    def schedule(
        self, budget: int, num_free_slots: int, reserved_pages: int, preempt_for_admission: PreemptForAdmission, preempt: Preempt = _nobody
    ) -> list[Chunk]:
        """The next step's chunks in order, of at most `budget` tokens, then the forks. Admits at most `num_free_slots`
        waiting sequences, and more where preemption frees a slot; leaves pages for `reserved_pages` blocks in the
        pool."""
        chunks: list[Chunk] = []
        forks: list[Chunk] = []
        admitted = sorted(self.prefilling, key=lambda s: s.scheduling_order, reverse=True)  # the first at the end
        is_open = True
        while budget > 0 and self._has_row(chunks):
            head = self.queue.head() if is_open else None
            if head is None or (admitted and admitted[-1].scheduling_order <= (self.queue.level(head), head.order)):
                if not admitted:
                    break
                budget = self._add_chunk(chunks, admitted.pop(), budget, partial(self._preempt_for_progress, preempt, admitted))
            elif num_free_slots > 0 and (fork := self._fork(head, reserved_pages)) is not None:
                num_free_slots -= 1
                forks.append(fork)
                budget -= FORK_TOKENS
            elif num_free_slots > 0 and self._admit(head, reserved_pages):
                if head in self._fetching:
                    continue
                num_free_slots -= 1
                budget = self._add_chunk(chunks, head, budget, lambda sequence: False)  # it has just got its pages
            elif preempt_for_admission(head, admitted):
                num_free_slots += 1
                admitted = [s for s in admitted if s.state is SequenceState.PREFILLING]
            else:
                is_open = False  # nobody overtakes the one that waits for room
        return chunks + forks

    @staticmethod
    def _preempt_for_progress(preempt: Preempt, left_out: list[Sequence], sequence: Sequence) -> bool:
        is_made = preempt(sequence, left_out)
        left_out[:] = [s for s in left_out if s.state is SequenceState.PREFILLING]
        return is_made

    def _admit(self, sequence: Sequence, reserved_pages: int) -> bool:
        """Whether there is room for it. If pages that it could start from went down to the tiers meanwhile, it waits
        for those instead."""
        table, num_tokens = sequence.prefill.pages, len(sequence.token_ids)
        if sequence.prefill.leader is not None:
            sequence.prefill.prompt_logprobs = sequence.prefill.leader.prefill.prompt_logprobs
        # The last token is computed anew, to sample from; a prompt that is to be scored, all of it.
        most = 0 if sequence.needs_prompt_scores else num_tokens - 1
        num_cached = self._manager.match_prefix(table, sequence, most)
        if not self._manager.grow(table, num_tokens, reserved_pages):
            self._manager.free(table)
            return False
        if self.tiers is not None and self.tiers.begin_again(sequence):
            self._manager.free(table)
            self.queue.remove(sequence)
            self._fetching.add(sequence)
            return True
        num_found = num_cached
        if self.recall is not None and not sequence.needs_prompt_scores:
            num_found = self.recall(sequence, table, num_found)
        if self.tiers is not None:
            num_found = self.tiers.fill(sequence, table, num_found)
        if num_found > num_cached:
            num_cached = num_found
            self._manager.insert(table, sequence, num_cached)
        # What a preempted one computes again is not its tenant's doing.
        self.queue.pop(sequence, num_tokens - num_cached if sequence.level is None else 0)
        self._begin(sequence, num_cached)
        return True

    def _fork(self, sequence: Sequence, reserved_pages: int) -> Fork | None:
        """Admit a sequence that can start from its leader's prompt, if there is room for it."""
        copies = self._shared.start(sequence, reserved_pages) if self._shared.has(sequence) else None
        if copies is None:
            return None
        if copies:  # at once: those who need room may be given the leader's pages before this step starts
            self.copy_pages([source for source, _ in copies], [target for _, target in copies])
        last_hidden = self._shared.last_hidden(sequence)
        assert sequence.prefill.leader is not None
        sequence.prefill.prompt_logprobs = sequence.prefill.leader.prefill.prompt_logprobs
        if self.tiers is not None:
            self.tiers.forget(sequence)
        self.queue.pop(sequence, 0)
        self._begin(sequence, sequence.num_prompt)
        return Fork(sequence, sequence.num_prompt, 0, True, sequence.epoch, last_hidden)

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        """A sequence has its pages, of which so many tokens come filled."""
        self._shared.leave(sequence)
        self.prefilling.append(sequence)
        sequence.prefill.num_computed = num_cached
        if sequence.prefill.first_scheduled_time is None:
            # What siblings start from was computed for the request: its cached tokens are those that its first
            # sequence found.
            sequence.prefill.num_cached = num_cached if sequence.prefill.leader is None else sequence.prefill.leader.prefill.num_cached
        sequence.state = SequenceState.PREFILLING

    def _has_row(self, chunks: list[Chunk]) -> bool:
        """Whether a program holds one more request."""
        return len(chunks) < prefill_rows(self.buckets[-1])

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int, preempt: Callable[[Sequence], bool]) -> int:
        """Append the sequence's next chunk, if there are pages for it; returns the budget left. Requests start at
        whole tiles, so a chunk uses up whole tiles."""
        left = len(sequence.token_ids) - sequence.prefill.num_computed
        if not left or budget <= 0 or not self._has_row(chunks):
            return budget
        length = min(left, budget)
        end = sequence.prefill.num_computed + length
        while not self._manager.advance(sequence.prefill.pages, sequence, sequence.prefill.num_computed, end):
            if not preempt(sequence):
                return budget
        chunks.append(Chunk(sequence, sequence.prefill.num_computed, length, is_last=length == left, epoch=sequence.epoch))
        sequence.prefill.num_computed += length
        return budget - -(-length // QUERY_TILE) * QUERY_TILE

    def bucket(self, chunks: list[Chunk]) -> int:
        """The token bucket that holds these chunks, each starting at a whole tile, one a row."""
        size = sum(-(-c.length // QUERY_TILE) * QUERY_TILE for c in chunks[:-1]) + chunks[-1].length
        return next(b for b in self.buckets if b >= size and prefill_rows(b) >= len(chunks))
