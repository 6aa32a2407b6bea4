"""Which prompt tokens the next prefill step computes. Imports no JAX."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.runtime.buckets import QUERY_TILE, prefill_rows
from jaxinfer.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's tokens in a prefill step."""

    sequence: Sequence
    start: int
    length: int
    is_last: bool  # the step samples the sequence's next token
    epoch: int  # of the sequence when the step was planned

    @property
    def is_current(self) -> bool:
        return self.sequence.state is SequenceState.PREFILLING and self.sequence.epoch == self.epoch


class PrefillScheduler:
    """First come, first served, in chunks under a token budget. A sequence gets pages for all its tokens when it is admitted, so that
    a prompt half computed never waits for pages."""

    def __init__(self, manager: KVManager, chunk_size: int, buckets: tuple[int, ...]) -> None:
        self._manager = manager
        self._chunk_size = chunk_size
        self._buckets = buckets
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []  # admitted: they hold pages, and some of their tokens are not in them yet

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def add_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again, before all that came after it."""
        place = next((i for i, other in enumerate(self.waiting) if other.order > sequence.order), len(self.waiting))
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give its prefill pages back; steps under way may still write to them, before any new owner does."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.PREFILLING:
            self.prefilling.remove(sequence)
        if sequence.prefix is not None and sequence.index > 0:
            self._manager.leave(sequence.prefix)
            sequence.prefix = None
        self._manager.free(sequence.prefill_pages)

    def done(self, sequence: Sequence) -> None:
        """All of a sequence's tokens are in its pages."""
        self.prefilling.remove(sequence)
        sequence.state = SequenceState.PREFILLED

    def schedule(self, num_free_slots: int, keep_free: int) -> list[Chunk]:
        """The next step's chunks, in order; admits at most `num_free_slots` waiting sequences, leaving `keep_free` pages in the pool."""
        chunks: list[Chunk] = []
        budget = self._chunk_size
        for sequence in self.prefilling:
            budget = self._add_chunk(chunks, sequence, budget)
        while budget > 0 and num_free_slots > 0 and self.waiting and self._has_row(chunks):
            sequence = self.waiting[0]
            if not self._admit(sequence, keep_free):
                break
            self.waiting.popleft()
            self.prefilling.append(sequence)
            num_free_slots -= 1
            budget = self._add_chunk(chunks, sequence, budget)
        return chunks

    def _admit(self, sequence: Sequence, keep_free: int) -> bool:
        prefix = sequence.prefix
        # Siblings of one request wait until the first has computed the prompt, then start from its pages.
        if prefix is not None and sequence.index > 0 and not prefix.is_ready:
            return False
        shared = prefix.pages if prefix is not None and sequence.index > 0 else []
        missing = self._manager.spec.pages_for(len(sequence.token_ids)) - len(shared)
        if self._manager.num_free - missing < keep_free:
            return False
        if prefix is not None and sequence.index > 0:
            sequence.num_cached = sequence.num_computed = self._manager.take_shared(prefix, sequence.prefill_pages)
            sequence.prompt_logprobs = prefix.prompt_logprobs
            sequence.prefix = None
        grown = self._manager.grow(sequence.prefill_pages, len(sequence.token_ids))
        assert grown
        sequence.state = SequenceState.PREFILLING
        return True

    def _has_row(self, chunks: list[Chunk]) -> bool:
        """Whether a program holds one more request."""
        return len(chunks) < prefill_rows(self._buckets[-1])

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        """Append the sequence's next chunk; returns the budget left. Requests start at whole tiles, so a chunk uses up whole tiles."""
        left = len(sequence.token_ids) - sequence.num_computed
        if not left or budget <= 0 or not self._has_row(chunks):
            return budget
        length = min(left, budget)
        chunks.append(Chunk(sequence, sequence.num_computed, length, is_last=length == left, epoch=sequence.epoch))
        sequence.num_computed += length
        return budget - -(-length // QUERY_TILE) * QUERY_TILE

    def bucket(self, chunks: list[Chunk]) -> int:
        """The token bucket that holds these chunks, each starting at a whole tile, one a row."""
        size = sum(-(-c.length // QUERY_TILE) * QUERY_TILE for c in chunks[:-1]) + chunks[-1].length
        return next(b for b in self._buckets if b >= size and prefill_rows(b) >= len(chunks))
