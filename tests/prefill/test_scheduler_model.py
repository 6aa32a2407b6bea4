"""PrefillScheduler step by step against a model that sorts everything anew each time and counts pages by looking at all tables."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.kv_cache.block_keys import TokenHistory, block_keys, digests
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.radix_cache import CachedBlock
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.prefill.scheduler import FORK_TOKENS, Chunk, Fork, PrefillScheduler
from jaxinfer.programs.buckets import QUERY_TILE, prefill_rows
from jaxinfer.request import RequestContext
from jaxinfer.segments import Prompt
from jaxinfer.sequence import Sequence, SequenceState
from tests import sequences

PAGE_SIZE, NUM_PAGES, AGEING, QUANTUM = 8, 30, 3.0, 100
WAITING, PREFILLING, PREFILLED, RUNNING, _, FINISHED = SequenceState


class Queue(WaitingQueue):
    """Notes who is admitted, and what that costs."""

    events: list[tuple[object, ...]]
    changes: list[tuple[Sequence, tuple[int | None, float], tuple[int | None, float]]]

    def pop(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        before = sequence.level, sequence.passed_over_seconds
        super().pop(sequence, num_tokens)
        self.events.append(("admitted", sequence, num_tokens))
        self.changes.append((sequence, before, (sequence.level, sequence.passed_over_seconds)))


class Manager(KVManager):
    """Finds the prefixes that it should, and room where there is any; notes where there was none."""

    def __init__(self, machine: PrefillSchedulerAgainstModel, clock: object, *, prefix_cache: bool) -> None:
        super().__init__(PageSpec(1, 1, 1, PAGE_SIZE, 4), NUM_PAGES + 1, prefix_cache=prefix_cache, clock=clock)  # type: ignore[arg-type]
        self.machine = machine
        self.num_found = 0
        self.known: dict[bytes, int] = {}  # pages, by what names them
        self.still_shared: list[object] = []  # what should be, when room has been looked for
        self.is_caching = prefix_cache
        self.save_evicted = self.forget_evicted

    def keys_of(self, history: TokenHistory, num_tokens: int) -> list[bytes]:
        return digests(history.context.namespace, block_keys(history, PAGE_SIZE, num_tokens // PAGE_SIZE))

    def match_prefix(self, table: list[int], history: TokenHistory, max_tokens: int) -> int:
        num_known = 0
        for key in self.keys_of(history, max_tokens):
            if key not in self.known:
                break
            num_known += PAGE_SIZE
        found = super().match_prefix(table, history, max_tokens)
        assert found == num_known == len(table) * PAGE_SIZE
        assert table == [self.known[key] for key in self.keys_of(history, found)]
        self.num_found = found
        return found

    def insert(self, table: list[int], history: TokenHistory, num_tokens: int) -> None:
        """What is known takes a table's own page's place, unless siblings read that, and with it what follows."""
        expected = list(table)
        for place, key in enumerate(self.keys_of(history, num_tokens) if self.is_caching else []):
            page = self.known.setdefault(key, table[place])
            if page != table[place] and self._allocator.references(table[place]) > 1:
                break
            expected[place] = page
        super().insert(table, history, num_tokens)
        assert table == expected

    def forget_evicted(self, evicted: list[CachedBlock]) -> None:
        for node in evicted:
            assert self.known.pop(node.digest) == node.page

    def grow(self, table: list[int], num_tokens: int, reserved_pages: int = 0) -> bool:
        missing = -(-num_tokens // PAGE_SIZE) - len(table)
        has_room = missing <= 0 or NUM_PAGES - len(self.machine.pages_held()) - missing >= reserved_pages
        self.check_given_up(missing + reserved_pages if has_room else 0)
        assert super().grow(table, num_tokens, reserved_pages) == has_room
        assert list(self._shared._tables) == self.still_shared
        self.machine.events.append(("room" if has_room else "no room", self.num_found))
        return has_room

    def fork(self, name: object, table: list[int], num_tokens: int, reserved_pages: int = 0) -> list[tuple[int, int]] | None:
        missing = int(num_tokens % PAGE_SIZE > 0)
        has_room = NUM_PAGES - len(self.machine.pages_held() + Counter(self._shared[name])) - missing >= reserved_pages
        self.check_given_up(missing + reserved_pages if has_room else 0, spare=name)
        copies = super().fork(name, table, num_tokens, reserved_pages)
        assert (copies is not None) == has_room
        assert list(self._shared._tables) == self.still_shared
        self.machine.events.append(("fork" if has_room else "no fork", 0))
        return copies

    def check_given_up(self, num_pages: int, spare: object = None) -> None:
        """Shared tables are given up, the oldest first, while there is too little room, and never in vain."""
        tables, held = dict(self._shared._tables), self.machine.pages_held()
        for name in [name for name in tables if name != spare]:
            if NUM_PAGES - len(held + Counter(page for table in tables.values() for page in table)) >= num_pages:
                break
            del tables[name]
        self.still_shared = list(tables)


class PrefillSchedulerAgainstModel(RuleBasedStateMachine):
    """Sequences come, are admitted, computed, handed over, decoded, preempted and aborted. Pages hold token ids: who starts from a page
    with others would be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.events: list[tuple[object, ...]] = []
        self.changes: list[tuple[Sequence, tuple[int | None, float], tuple[int | None, float]]] = []  # that admission made to sequences
        self.live: list[Sequence] = []
        self.num_done: dict[Sequence, int] = {}  # tokens, of those that prefill
        self.steps: deque[list[Chunk]] = deque()  # under way
        self.pool: dict[tuple[int, int], int] = {}  # by page and place in it
        self.siblings: set[Sequence] = set()  # that could start from a shared prompt, and haven't yet

    @initialize(prefix_cache=st.sampled_from([True, True, False]), buckets=st.sampled_from([(32, 128), (32, 50), (16,), (256,)]))
    def begin(self, prefix_cache: bool, buckets: tuple[int, ...]) -> None:
        self.manager = Manager(self, lambda: self.now, prefix_cache=prefix_cache)
        queue = Queue(AGEING, QUANTUM, clock=lambda: self.now)
        queue.events, queue.changes = self.events, self.changes
        self.buckets = buckets
        self.scheduler = PrefillScheduler(self.manager, queue, buckets)
        self.scheduler.copy_pages = self.copy_pages
        self.queue = WaitingQueue(AGEING, QUANTUM, clock=lambda: self.now)  # does what the scheduler's should

    # What the model says.

    def in_state(self, *states: SequenceState) -> list[Sequence]:
        return [sequence for sequence in self.live if sequence.state in states]

    def pages_held(self) -> Counter[int]:
        return Counter(page for sequence in self.live for page in (*sequence.prefill.pages, *sequence.decode.pages))

    def waits_for_its_leader(self, sequence: Sequence) -> bool:
        leader = sequence.prefill.leader
        return leader is not None and leader in self.in_state(WAITING, PREFILLING) and len(leader.token_ids) == leader.num_prompt

    def check_step(self, chunks: list[Chunk], prefilling: list[Sequence], budget: int, num_free_slots: int) -> None:
        """Go through a step as it was planned: every event in its turn, and all of them."""
        events, is_open = deque(self.events), True
        planned, forks = (deque(chunk for chunk in chunks if isinstance(chunk, Fork) == is_fork) for is_fork in (False, True))
        num_chunks = len(planned)
        assert chunks == [*planned, *forks]
        prefilling = sorted(prefilling, key=lambda s: s.scheduling_order)
        for sequence, (level, passed_over), _ in self.changes:
            sequence.level, sequence.passed_over_seconds = level, passed_over

        def expect_chunk(sequence: Sequence, start: int) -> None:
            nonlocal budget
            length = min(len(sequence.token_ids) - start, budget)
            is_last = start + length == len(sequence.token_ids)
            assert planned.popleft() == Chunk(sequence, start, length, is_last, sequence.epoch)
            self.num_done[sequence] = start + length
            while length > 0:
                budget, length = budget - QUERY_TILE, length - QUERY_TILE

        while budget > 0 and num_chunks - len(planned) < prefill_rows(self.buckets[-1]):
            head = self.queue.head() if is_open else None
            if prefilling and (head is None or prefilling[0].scheduling_order <= (self.queue.level(head), head.order)):
                sequence = prefilling.pop(0)
                if self.num_done[sequence] < len(sequence.token_ids):
                    expect_chunk(sequence, self.num_done[sequence])
                continue
            if head is None:
                break
            if num_free_slots > 0 and events[0][0] in ("fork", "no fork"):
                assert head in self.siblings
                if events.popleft()[0] == "fork":
                    assert events.popleft() == ("admitted", head, 0)
                    assert forks.popleft() == Fork(head, head.num_prompt, 0, True, head.epoch, head.prefill.leader)
                    self.queue.pop(head, 0)
                    self.siblings.discard(head)
                    self.num_done[head] = head.num_prompt
                    num_free_slots, budget = num_free_slots - 1, budget - FORK_TOKENS
                    continue
            had_pages, num_found = events.popleft() if num_free_slots > 0 else (None, 0)
            kind, sequence, other = events.popleft()
            assert sequence is head
            if kind == "admitted":
                assert had_pages == "room"
                assert num_found < len(head.token_ids)
                assert num_found == 0 or not head.needs_prompt_scores
                assert other == (len(head.token_ids) - num_found if head not in self.num_done else 0)
                self.queue.pop(head, other)
                self.siblings.discard(head)
                num_free_slots -= 1
                expect_chunk(head, num_found)
            else:
                assert kind == "asked for room"
                assert had_pages in (None, "no room")
                if other is None:
                    is_open = False
                    continue
                num_free_slots += 1
                self.queue.add(other)
                if other in prefilling:
                    prefilling.remove(other)
        assert not events
        assert not planned
        assert not forks
        assert all((sequence.level, sequence.passed_over_seconds) == after for sequence, _, after in self.changes)

    # What an engine does.

    def preempt_for_admission(self, head: Sequence, prefilling: list[Sequence]) -> bool:
        level = self.scheduler.queue.level(head)
        assert set(prefilling) <= set(self.in_state(PREFILLING))
        holders = [*self.in_state(PREFILLED, RUNNING), *prefilling]
        victim = max((s for s in holders if s.scheduling_order[0] > level), key=lambda s: s.scheduling_order, default=None)
        self.events.append(("asked for room", head, victim))
        if victim is not None:
            self.take_back(victim)
        return victim is not None

    def take_back(self, sequence: Sequence) -> None:
        self.give_back_decode_pages(sequence)
        self.scheduler.remove(sequence)
        sequence.epoch += 1
        sequence.prefill.num_computed = 0
        sequence.state = WAITING
        self.scheduler.add(sequence)

    def give_back_decode_pages(self, sequence: Sequence) -> None:
        if sequence.decode.pages:
            self.manager.insert(sequence.decode.pages, sequence, len(sequence.token_ids) - 1)
            self.manager.free(sequence.decode.pages)

    def write(self, table: list[int], start: int, tokens: list[int]) -> None:
        for place, token in enumerate(tokens, start):
            self.pool[table[place // PAGE_SIZE], place % PAGE_SIZE] = token

    def read(self, table: list[int], num_tokens: int) -> list[int]:
        return [self.pool[table[place // PAGE_SIZE], place % PAGE_SIZE] for place in range(num_tokens)]

    def copy_pages(self, source_ids: list[int], target_ids: list[int]) -> None:
        for source, target in zip(source_ids, target_ids, strict=True):
            self.pool |= {(target, place): self.pool[source, place] for place in range(PAGE_SIZE) if (source, place) in self.pool}

    # What happens.

    @rule(
        num_common=st.sampled_from([0, 8, 31, 64, 64, 100]),
        num_own=st.integers(1, 60),
        own=st.sampled_from([1, 1, 2]),
        context=st.builds(
            RequestContext,
            tenant=st.sampled_from("ab"),
            namespace=st.sampled_from(["", "", "", "b"]),
            session=st.sampled_from([None, "s"]),
            priority=st.sampled_from([0, 0, 10, 20]),
        ),
        n=st.sampled_from([1, 1, 1, 3]),
        is_scored=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, num_common: int, num_own: int, own: int, context: RequestContext, n: int, is_scored: bool) -> None:
        tokens = [0] * num_common + [own] * num_own
        leader = None
        for _ in range(n):
            sequence = sequences.make(len(tokens), leader=leader, n=n, prompt_logprobs=0 if is_scored else None, context=context)
            sequence.request = dataclasses.replace(sequence.request, prompt=Prompt.of_tokens(tokens))
            sequence.token_ids = list(tokens)
            self.scheduler.add(sequence)
            self.live.append(sequence)
            if leader is None:
                self.queue.add(sequence)
            leader = leader or sequence

    @rule(
        part=st.sampled_from([0.1, 0.4, 1.0, 1.0]),
        num_free_slots=st.sampled_from([0, 1, 2, 9, 9]),
        reserved_pages=st.sampled_from([0, 0, 0, 3]),
    )
    def start_step(self, part: float, num_free_slots: int, reserved_pages: int) -> None:
        if len(self.steps) == 2:
            self.end_step()
        budget, prefilling = int(part * self.buckets[-1]), self.in_state(PREFILLING)
        self.events.clear()
        self.changes.clear()
        chunks = self.scheduler.schedule(budget, num_free_slots, reserved_pages, self.preempt_for_admission)
        self.check_step(chunks, prefilling, budget, num_free_slots)
        if not chunks:
            return
        computed = [chunk for chunk in chunks if not isinstance(chunk, Fork)]
        bucket = self.scheduler.bucket(computed) if computed else 0
        places = [0]
        for chunk in chunks:
            if not isinstance(chunk, Fork):  # which has no place among the step's tokens
                assert places[-1] % QUERY_TILE == 0
                assert places[-1] + chunk.length <= bucket
                places.append(places[-1] + -(-chunk.length // QUERY_TILE) * QUERY_TILE)
            tokens, table = chunk.sequence.token_ids, chunk.sequence.prefill.pages
            assert len(table) == -(-len(tokens) // PAGE_SIZE)
            assert self.read(table, chunk.start) == tokens[: chunk.start], "the pages hold what comes before"
            self.write(table, chunk.start, tokens[chunk.start : chunk.start + chunk.length])
        assert len(computed) <= prefill_rows(bucket)
        self.steps.append(chunks)

    @precondition(lambda self: self.steps)
    @rule()
    def end_step(self) -> None:
        for chunk in self.steps.popleft():
            sequence = chunk.sequence
            if not chunk.is_current:
                assert sequence not in self.in_state(PREFILLING) or sequence.epoch != chunk.epoch
                continue
            if not chunk.is_last:
                continue
            held = [s for s in self.in_state(WAITING) if s.prefill.leader is sequence and self.waits_for_its_leader(s)]
            self.scheduler.done(sequence, lambda leader=sequence: leader)
            self.siblings |= set(held)
            assert sequence.state is PREFILLED
            if sequence.params.prompt_logprobs is not None:
                sequence.prefill.prompt_logprobs = [None] * sequence.num_prompt
            sequence.token_ids.append(7)
            for sibling in held:
                self.queue.add(sibling)

    @precondition(lambda self: self.in_state(PREFILLED, RUNNING))
    @rule(which=st.integers(0, 99), count=st.integers(0, 12))
    def decode(self, which: int, count: int) -> None:
        """On the same mesh, after the hand-off if that is still to be done."""
        ready = self.in_state(PREFILLED, RUNNING)
        sequence = ready[which % len(ready)]
        if sequence.state is PREFILLED:
            sequence.decode.pages, sequence.prefill.pages = sequence.prefill.pages, []
            sequence.state = RUNNING
        for _ in range(count):
            num_tokens = len(sequence.token_ids)
            if not self.manager.grow(sequence.decode.pages, num_tokens):
                break
            self.write(sequence.decode.pages, num_tokens - 1, sequence.token_ids[-1:])
            assert self.read(sequence.decode.pages, num_tokens) == sequence.token_ids
            sequence.token_ids.append(num_tokens % 5)

    @precondition(lambda self: self.in_state(PREFILLING, PREFILLED, RUNNING))
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        holders = self.in_state(PREFILLING, PREFILLED, RUNNING)
        sequence = holders[which % len(holders)]
        self.take_back(sequence)
        self.queue.add(sequence)

    @precondition(lambda self: len(self.live) > 3)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        """Or finish, which is the same. A request goes with all its sequences, the first of them first."""
        chosen = self.live[which % len(self.live)]
        first = chosen.prefill.leader or chosen
        for sequence in [s for s in self.live if s is first or s.prefill.leader is first]:
            if sequence.state is WAITING and not self.waits_for_its_leader(sequence):
                self.queue.remove(sequence)
            self.give_back_decode_pages(sequence)
            self.scheduler.remove(sequence)
            assert not sequence.prefill.pages
        for sequence in [s for s in self.live if s is first or s.prefill.leader is first]:
            sequence.state = FINISHED
            self.live.remove(sequence)
            self.siblings.discard(sequence)

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    # What always holds.

    @invariant()
    def just_those_wait_and_prefill_that_should(self) -> None:
        waiting = sorted(self.in_state(WAITING), key=lambda s: s.order)
        assert self.scheduler.waiting == waiting
        assert self.scheduler.num_waiting == len(waiting)
        assert list(self.scheduler.queue) == list(self.queue) == [s for s in waiting if not self.waits_for_its_leader(s)]
        assert set(self.scheduler.prefilling) == set(self.in_state(PREFILLING))
        assert all(s.prefill.num_computed == self.num_done[s] for s in self.in_state(PREFILLING))
        assert not any(s.prefill.pages or s.decode.pages for s in waiting)

    @invariant()
    def prompts_are_shared_while_siblings_wait(self) -> None:
        shared = set(self.manager._shared._tables)
        assert shared <= {sibling.prefill.leader for sibling in self.siblings}
        assert self.siblings <= set(self.in_state(WAITING))

    @invariant()
    def no_page_is_lost(self) -> None:
        held = self.pages_held() + Counter(self.manager._shared.pages())
        references = self.manager._allocator.references
        assert {page: references(page) for page in range(NUM_PAGES + 1) if references(page)} == held
        assert self.manager.num_free == NUM_PAGES - len(held)
        assert self.manager.num_cached == len(self.manager.known)


TestPrefillSchedulerAgainstModel = PrefillSchedulerAgainstModel.TestCase
TestPrefillSchedulerAgainstModel.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
