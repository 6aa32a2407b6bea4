"""DecodeScheduler step by step against a model that sorts everything anew each time and counts pages by looking at all tables."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.decode.scheduler import DecodeScheduler
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.request import RequestContext
from jaxinfer.segments import Prompt
from jaxinfer.sequence import Sequence, SequenceState
from tests import sequences

PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 2, 16, 4
ANY = st.integers(0, 99)


class DecodeSchedulerAgainstModel(RuleBasedStateMachine):
    """Sequences are handed over, decode with a step under way, are rolled back, end, and are preempted; on a mesh that they share with prompts, or without.
    Pages hold token ids; the token at a place is known before it is sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []  # that hold pages of the same pool
        self.waiting: list[Sequence] = []  # that were preempted
        self.steps: deque[list[tuple[Sequence, int]]] = deque()  # under way: sequences and their epochs
        self.pool: dict[tuple[int, int], int] = {}  # by page and place in it
        self.victims: list[Sequence] = []
        self.num_shared: dict[Sequence, int] = {}  # tokens at the start of a running one whose pages the prefix cache has

    @initialize(prefix_cache=st.booleans())
    def begin(self, prefix_cache: bool) -> None:
        self.manager = KVManager(PageSpec(1, 1, 1, PAGE_SIZE, 4), NUM_PAGES + 1, prefix_cache=prefix_cache)
        self.scheduler = DecodeScheduler(self.manager, NUM_SLOTS)
        self.keeps = prefix_cache

    # What the model says.

    def token(self, sequence: Sequence, place: int) -> int:
        return sequence.token_ids[place] if place < sequence.num_prompt else place % 3

    def can_go_on(self, sequence: Sequence) -> bool:
        return len(sequence.token_ids) - sequence.num_prompt + sequence.decode.num_in_flight < sequence.max_tokens

    def pages_held(self) -> Counter[int]:
        return Counter(page for sequence in (*self.running, *self.prefilling) for page in (*sequence.decode.pages, *sequence.prefill.pages))

    def expected(self) -> tuple[list[Sequence], list[Sequence], list[int]]:
        """Who is scheduled, who is preempted in what order, and which of the scheduled get a page."""
        tables: dict[Sequence, list[object]] = {s: [*s.decode.pages, *s.prefill.pages] for s in (*self.running, *self.prefilling)}
        scheduled, victims, grown = [], [], []
        for sequence in sorted(self.running, key=lambda s: s.scheduling_order):
            if sequence in victims or not self.can_go_on(sequence):
                continue
            needs_page = len(sequence.token_ids) + sequence.decode.num_in_flight > len(tables[sequence]) * PAGE_SIZE
            while needs_page and len({page for table in tables.values() for page in table}) == NUM_PAGES and sequence in tables:
                victims.append(max(tables, key=lambda s: s.scheduling_order))
                del tables[victims[-1]]
            if sequence not in tables:
                continue
            if needs_page:
                tables[sequence].append(object())
                grown.append(len(scheduled))
            scheduled.append(sequence)
        return scheduled, victims, grown

    # What an engine does.

    def preempt(self) -> Sequence | None:
        victim = max((*self.running, *self.prefilling), key=lambda s: s.scheduling_order)
        if victim in self.running:
            self.stop(victim)
        else:
            self.prefilling.remove(victim)
            self.manager.free(victim.prefill.pages)
        victim.epoch += 1
        victim.decode.num_in_flight = 0
        victim.state = SequenceState.WAITING
        self.waiting.append(victim)
        self.victims.append(victim)
        return victim

    def stop(self, sequence: Sequence) -> None:
        self.scheduler.leave(sequence)
        assert sequence.decode.pages == []
        assert sequence.decode.slot == -1
        self.running.remove(sequence)
        found: list[int] = []
        num_written = len(sequence.token_ids) - 1
        num_found = self.manager.match_prefix(found, sequence, num_written)
        assert num_found == (num_written // PAGE_SIZE * PAGE_SIZE if self.keeps else 0)
        self.manager.free(found)

    def hand_over(self, sequence: Sequence) -> bool:
        table, num_tokens = sequence.decode.pages, len(sequence.token_ids) - 1
        held = self.manager.match_prefix(table, sequence, num_tokens)
        if not self.manager.grow(table, num_tokens):
            self.manager.free(table)
            return False
        for place in range(held, num_tokens):
            self.write(sequence, place)
        self.manager.insert(table, sequence, num_tokens)
        self.num_shared[sequence] = num_tokens // PAGE_SIZE * PAGE_SIZE if self.keeps else 0
        used = {other.decode.slot for other in self.running}
        self.scheduler.join(sequence)
        assert sequence.decode.slot == min(set(range(NUM_SLOTS)) - used)
        assert sequence.state is SequenceState.RUNNING
        self.running.append(sequence)
        return True

    def write(self, sequence: Sequence, place: int) -> None:
        self.pool[sequence.decode.pages[place // PAGE_SIZE], place % PAGE_SIZE] = self.token(sequence, place)

    # What happens.

    @precondition(lambda self: len(self.running) < NUM_SLOTS)
    @rule(num_prompt=st.integers(1, 9), own=st.sampled_from([3, 3, 4]), level=st.sampled_from([0, 0, 20]), max_tokens=st.integers(2, 20))
    def join(self, num_prompt: int, own: int, level: int, max_tokens: int) -> None:
        sequence = sequences.make(num_prompt, max_tokens=max_tokens, context=RequestContext(priority=level))
        tokens = [0] * (num_prompt - 1) + [own]
        sequence.request = dataclasses.replace(sequence.request, prompt=Prompt.of_tokens(tokens))
        sequence.token_ids = tokens
        sequence.token_ids.append(self.token(sequence, num_prompt))
        sequence.level = level
        self.hand_over(sequence)

    @precondition(lambda self: self.waiting and len(self.running) < NUM_SLOTS)
    @rule(which=ANY)
    def join_again(self, which: int) -> None:
        """Computed anew by prefill, and with the next token, which that sampled."""
        sequence = self.waiting[which % len(self.waiting)]
        if self.can_go_on(sequence):
            sequence.token_ids.append(self.token(sequence, len(sequence.token_ids)))
        if self.hand_over(sequence):
            self.waiting.remove(sequence)

    @precondition(lambda self: len(self.prefilling) < 2)
    @rule(num_prompt=st.integers(1, 9), level=st.sampled_from([0, 20]))
    def prefill(self, num_prompt: int, level: int) -> None:
        sequence = sequences.make(num_prompt)
        sequence.level = level
        if self.manager.grow(sequence.prefill.pages, num_prompt):
            self.prefilling.append(sequence)

    @precondition(lambda self: self.prefilling)
    @rule(which=ANY)
    def prefill_ends(self, which: int) -> None:
        self.manager.free(self.prefilling.pop(which % len(self.prefilling)).prefill.pages)

    @rule()
    def step(self) -> None:
        """As the worker does: with one under way another is started, then that one is read."""
        scheduled, victims, grown = self.expected()
        self.victims.clear()
        assert self.scheduler.schedule(self.preempt) == scheduled
        assert self.victims == victims
        assert self.scheduler.grown == grown
        for sequence in scheduled:
            place = len(sequence.token_ids) - 1 + sequence.decode.num_in_flight
            assert len(sequence.decode.pages) == place // PAGE_SIZE + 1
            self.write(sequence, place)
            read = [self.pool[page, i] for page in sequence.decode.pages for i in range(PAGE_SIZE) if (page, i) in self.pool][: place + 1]
            assert read == [self.token(sequence, i) for i in range(place + 1)]
            sequence.decode.num_in_flight += 1
        if scheduled:
            self.steps.append([(sequence, sequence.epoch) for sequence in scheduled])
        if len(self.steps) > (1 if scheduled else 0):
            self.read_step()

    def read_step(self) -> None:
        for sequence, epoch in self.steps.popleft():
            if sequence.epoch != epoch or sequence not in self.running:
                continue
            sequence.decode.num_in_flight -= 1
            sequence.token_ids.append(self.token(sequence, len(sequence.token_ids)))
            if len(sequence.token_ids) - sequence.num_prompt == sequence.max_tokens:
                self.stop(sequence)

    @precondition(lambda self: self.running)
    @rule(which=ANY)
    def end(self, which: int) -> None:
        """By a stop token, or an abort."""
        self.stop(self.running[which % len(self.running)])

    @precondition(lambda self: self.running)
    @rule(which=ANY)
    def preempt_for_admission(self, which: int) -> None:
        """To more urgent work that waits for its place."""
        sequence = self.running[which % len(self.running)]
        self.stop(sequence)
        sequence.epoch += 1
        sequence.decode.num_in_flight = 0
        self.waiting.append(sequence)

    @precondition(lambda self: self.running)
    @rule(which=ANY, num_tokens=st.integers(1, 9))
    def roll_back(self, which: int, num_tokens: int) -> None:
        sequence = self.running[which % len(self.running)]
        num_tokens = min(num_tokens, sequence.num_output)
        newest = len(sequence.token_ids) - num_tokens - 1
        is_own = newest >= self.num_shared.get(sequence, 0)
        assert self.manager.can_rewrite(sequence.decode.pages, newest, sequence.num_prompt) == is_own
        if not num_tokens or not is_own:
            return
        kept = sequence.decode.pages[: newest // PAGE_SIZE + 1]
        self.scheduler.roll_back(sequence, num_tokens)
        assert sequence.decode.pages == kept
        assert len(sequence.token_ids) == newest + 1
        for page in kept[newest // PAGE_SIZE :]:  # what was written from there on is nobody's any more
            for place in range(newest % PAGE_SIZE, PAGE_SIZE):
                self.pool.pop((page, place), None)

    # What always holds.

    @invariant()
    def all_run_that_should_in_turn_and_in_slots_of_their_own(self) -> None:
        assert self.scheduler.running == sorted(self.running, key=lambda s: s.scheduling_order)
        slots = [sequence.decode.slot for sequence in self.running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(NUM_SLOTS))

    @invariant()
    def no_page_is_lost(self) -> None:
        held = self.pages_held()
        references = self.manager._allocator.references
        assert {page: references(page) for page in range(NUM_PAGES + 1) if references(page)} == held
        assert self.manager.num_free == NUM_PAGES - len(held)


TestDecodeSchedulerAgainstModel = DecodeSchedulerAgainstModel.TestCase
TestDecodeSchedulerAgainstModel.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
