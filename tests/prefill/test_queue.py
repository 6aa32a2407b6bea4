"""The waiting queue: by example in simulated time, and step by step against a model that goes round tenant by tenant."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.request import RequestContext
from jaxinfer.sequence import Sequence
from tests import sequences

PRIORITY, INTERACTIVE, FLEX, BATCH = -10, 0, 10, 20
AGEING, QUANTUM = 3.0, 100


class Line:
    """A queue, and a clock that a test moves."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self.now = 1000.0
        self.queue = WaitingQueue(AGEING, quantum, clock=lambda: self.now)

    def add(self, tenant: str = "", priority: int = INTERACTIVE, length: int = 10) -> Sequence:
        sequence = make(tenant, priority, length)
        self.queue.add(sequence)
        return sequence

    def admit(self) -> Sequence:
        head = self.queue.head()
        self.queue.pop(head)
        return head

    def admit_tenants(self, count: int) -> str:
        return "".join(self.admit().request.context.tenant for _ in range(count))


def make(tenant: str, priority: int, length: int) -> Sequence:
    sequence = sequences.make(length)
    sequence.request = dataclasses.replace(sequence.request, context=RequestContext(tenant=tenant, priority=priority))
    return sequence


def test_urgent_work_goes_first_and_the_oldest_of_equals():
    line = Line()
    batch, flex, first, second, priority = (line.add(priority=p) for p in (BATCH, FLEX, INTERACTIVE, INTERACTIVE, PRIORITY))
    assert list(line.queue) == [batch, flex, first, second, priority], "oldest first"
    assert [line.admit() for _ in range(5)] == [priority, first, second, flex, batch]
    assert line.queue.head() is None


def test_looking_at_the_head_changes_nothing():
    line = Line()
    for tenant in "abab":
        line.add(tenant, length=70)
    heads = {line.queue.head() for _ in range(10)}
    assert len(heads) == 1
    assert line.admit() in heads


def test_a_sequence_can_leave_from_anywhere():
    line = Line()
    waiting = [line.add(tenant, priority) for tenant in "ab" for priority in (BATCH, INTERACTIVE) for _ in range(3)]
    for sequence in (waiting[1], waiting[3], waiting[11], waiting[0]):
        assert sequence in line.queue
        line.queue.remove(sequence)
        waiting.remove(sequence)
        assert sequence not in line.queue
        assert list(line.queue) == waiting
        assert len(line.queue) == len(waiting)
    assert make("c", INTERACTIVE, 1) not in line.queue
    with pytest.raises(AssertionError, match="does not wait"):
        line.queue.remove(make("a", BATCH, 1))


def test_a_preempted_sequence_goes_before_those_of_its_kind_that_came_later():
    line = Line()
    first, second, *others = [line.add(priority=BATCH) for _ in range(4)]
    assert [line.admit(), line.admit()] == [first, second]
    line.queue.add(second)
    line.queue.add(first)
    assert [line.admit() for _ in range(4)] == [first, second, *others]


# Ageing.


def overload(line: Line, seconds: float, priority: int = INTERACTIVE, every: float = 1.0) -> list[tuple[float, Sequence]]:
    """Admits a sequence and adds another of one priority, again and again; what else was admitted, and after how long."""
    start, others = line.now, []
    line.add("flood", priority)
    while line.now < start + seconds:
        line.add("flood", priority)
        head = line.admit()
        if head.request.context.priority != priority:
            others.append((line.now - start, head))
        line.now += every
    return others


@pytest.mark.parametrize(
    ("waits", "comes", "seconds"), [(BATCH, INTERACTIVE, 60), (FLEX, INTERACTIVE, 30), (INTERACTIVE, PRIORITY, 30), (BATCH, PRIORITY, 90)]
)
def test_no_work_starves_however_much_more_urgent_work_comes(waits, comes, seconds):
    line = Line()
    sequence = line.add("patient", waits)
    [(after, admitted)] = overload(line, 300, comes)
    assert admitted is sequence
    assert seconds <= after <= seconds + QUANTUM / 10, "then it waits for its tenant's turn, a quantum of requests of 10 tokens"


def test_under_overload_a_line_of_batch_work_moves_on_by_one_an_admission():
    line = Line()
    batch = [line.add("patient", BATCH) for _ in range(3)]
    admitted = overload(line, 250)
    assert [sequence for _, sequence in admitted] == batch
    times = [after for after, _ in admitted]
    assert all(60 <= gap <= 70 for gap in (times[0], times[1] - times[0], times[2] - times[1]))


def test_the_tenant_that_sends_too_much_does_not_starve_its_own_batch_work():
    line = Line()
    sequence = line.add("flood", BATCH)
    assert [admitted for _, admitted in overload(line, 100)] == [sequence]


def test_a_long_batch_is_not_urgent_for_being_long():
    """It waits for itself: nobody overtook it."""
    line = Line()
    for _ in range(200):
        line.add(priority=BATCH)
    for _ in range(100):
        line.admit()
        line.now += 60
    sequence = line.add()
    assert line.admit() is sequence
    assert line.admit().request.context.priority == BATCH
    line.now += 59
    sequence = line.add()
    assert line.admit() is sequence, "nor for having been overtaken before its last turn"


def test_an_aged_sequence_is_as_urgent_as_what_went_before_it_and_no_more():
    line = Line()
    batch, flex = line.add("a", BATCH), line.add("b", FLEX)
    line.add()
    line.admit()
    for seconds, of_batch, of_flex in ((0, 20, 10), (2.9, 20, 10), (3, 19, 9), (30, 10, 0), (300, 0, 0)):
        line.now = 1000 + seconds
        assert (line.queue.level(batch), line.queue.level(flex)) == (of_batch, of_flex)
    urgent = line.add("c", PRIORITY)
    assert (line.queue.level(batch), line.queue.level(flex)) == (0, 0)
    assert line.admit() is urgent
    assert (line.queue.level(batch), line.queue.level(flex)) == (PRIORITY, PRIORITY)


def test_what_went_before_it_in_an_earlier_turn_does_not_count():
    line = Line()
    first, second = (line.add("patient", BATCH) for _ in range(2))
    line.add(priority=PRIORITY)
    line.admit()
    line.now += 90
    assert line.queue.level(first) == PRIORITY
    assert line.admit() is first
    line.add()
    line.admit()
    line.now += 300
    assert line.queue.level(second) == INTERACTIVE


def test_a_turn_of_its_equals_is_not_preferred_to_it():
    line = Line()
    line.add("a")
    waiting = line.add("b")
    line.admit()
    line.now += 300
    line.add("a", PRIORITY)
    line.admit()
    assert line.queue.level(waiting) == INTERACTIVE
    line.now += AGEING
    assert line.queue.level(waiting) == INTERACTIVE - 1


def test_the_next_of_a_line_does_not_begin_anew_when_the_first_is_aborted():
    line = Line()
    first, second = line.add("patient", BATCH), line.add("patient", BATCH)
    overload(line, 50)
    line.queue.remove(first)
    [(after, admitted)] = overload(line, 30)
    assert admitted is second
    assert after <= 20


def test_admitted_sequences_say_at_what_level():
    line = Line()
    early, late = line.add(priority=BATCH), line.add(priority=BATCH)
    assert line.admit() is early
    assert early.level == BATCH, "interactive work goes first"
    overload(line, 65)
    assert late.level == INTERACTIVE, "it waited long enough not to"


def test_a_preempted_sequence_keeps_the_level_it_was_admitted_at():
    line = Line()
    sequence = line.add("patient", BATCH)
    overload(line, 70)
    assert sequence.level == INTERACTIVE
    line.queue.add(sequence)
    [(after, admitted)] = overload(line, 20)
    assert admitted is sequence
    assert after <= QUANTUM / 10


def test_a_turn_too_short_to_get_anywhere_does_not_make_it_wait_anew():
    """Requests that come one by one leave gaps, in which batch work is admitted, to be preempted at once."""
    line = Line()
    batch = line.add("patient", BATCH)
    interactive = line.add("others")
    while line.now < 1200:
        assert line.admit() is interactive
        line.now += 1
        assert line.admit() is batch
        interactive = line.add("others")
        if batch.level == INTERACTIVE:
            break
        line.queue.add(batch)  # it is preempted
    assert line.now == 1060, "20 levels of 3 seconds"


# Fair shares.


def test_tenants_are_served_a_quantum_of_tokens_a_round():
    line = Line()
    for tenant, length in (("a", 25), ("b", 50), ("c", 100)):
        for _ in range(20):
            line.add(tenant, length=length)
    assert line.admit_tenants(14) == "aaaabbc" * 2


def test_a_flood_holds_nobody_up_however_long_it_has_waited():
    line = Line()
    for _ in range(1000):
        line.add("flood")
    for _ in range(100):
        line.admit()
        line.now += 60
    sequence = line.add("polite")
    assert sequence in [line.admit() for _ in range(QUANTUM // 10 + 1)]


def test_outputs_are_paid_for_when_they_are_made():
    line = Line()
    for tenant in "ab" * 20:
        line.add(tenant, length=50)
    assert line.admit_tenants(1) == "a"
    line.queue.charge("a", 250)
    assert line.admit_tenants(7) == "bbbbbba", "b has 300 tokens too by then"


def test_tokens_found_in_the_cache_cost_nothing():
    line = Line()
    for tenant in "ab" * 9:
        line.add(tenant, length=50)
    admitted = []
    for _ in range(7):
        admitted.append(line.queue.head())
        line.queue.pop(admitted[-1], 50 if admitted[-1].request.context.tenant == "a" else 25)
    assert "".join(sequence.request.context.tenant for sequence in admitted) == "aabbbba"


def test_pausing_pays_no_debt_and_keeps_no_credit():
    line = Line()
    for _ in range(20):
        line.add("b", length=50)
    line.add("a", length=50)
    assert line.admit_tenants(3) == "bba"
    line.queue.charge("a", 350)  # its turn's other 50 were lost when nothing of it waited
    for _ in range(9):
        line.add("a", length=50)
    assert line.admit_tenants(12) == "bb" * 4 + "a" + "bb" + "a"


@pytest.mark.parametrize(("num_outputs", "turns"), [(0, "abbbaa"), (100_000, "aaabbb")])
def test_what_a_tenant_gets_while_no_other_waits_ends_its_turn_but_makes_no_debt(num_outputs, turns):
    line = Line()
    for _ in range(50):
        line.add("a", length=40)
    line.admit_tenants(2)
    line.queue.charge("a", num_outputs)
    for _ in range(50):
        line.add("b", length=40)
    assert line.admit_tenants(6) == turns, "20 tokens of its round were left, or a new one begins"


def test_debts_end_when_nobody_waits():
    line = Line()
    for tenant in "ab":
        line.add(tenant)
    line.admit()
    line.queue.charge("a", 100_000)
    line.admit()
    for _ in range(20):
        line.add("a", length=50)
        line.add("b", length=50)
    assert line.admit_tenants(4) == "aabb"


def test_a_tenant_whose_head_is_passed_over_gathers_no_credit():
    line = Line()
    for tenant in "ab" * 20:
        line.add(tenant, length=50)
    for sequence in [sequence for sequence in line.queue if sequence.request.context.tenant == "b"][:6]:
        line.queue.pop(sequence)
    assert line.admit_tenants(6) == "aabbaa"


def test_a_visit_that_only_pays_a_debt_is_a_turn_too():
    line = Line()
    line.add("a")
    urgent = line.add("b")
    line.add("b", BATCH)
    line.add("c", BATCH)
    for tenant in "ab":
        line.queue.charge(tenant, 150)
    assert line.admit_tenants(1) == "a", "at the second visit, and b had its first"
    line.queue.remove(urgent)
    assert line.admit_tenants(2) == "cb"


def test_interactive_work_in_between_favours_neither_batch():
    """A round that began anew, or lost its place, at every interruption would serve one of them alone."""
    line, got = Line(), {"a": 0, "b": 0}
    for tenant in "ab" * 100:
        line.add(tenant, BATCH, length=30)
    for _ in range(100):
        line.add("interactive", length=90)
        assert line.admit_tenants(1) == "interactive"
        got[line.admit_tenants(1)] += 30
        assert abs(got["a"] - got["b"]) <= QUANTUM + 30


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_tenants=st.integers(2, 4), quantum=st.sampled_from([1, 10, 64, 500]), most=st.sampled_from([1, 60, 300]))
def test_tenants_that_always_wait_are_never_far_apart(data, num_tenants, quantum, most):
    """Within a quantum and a request of each other from the start, and within another request over any stretch."""
    line, tenants = Line(quantum), "abcd"[:num_tenants]
    lengths, outputs = st.integers(1, most), st.integers(0, 200)
    got, history = dict.fromkeys(tenants, 0), []
    largest = 0
    for tenant in tenants:
        for _ in range(2):
            line.add(tenant, length=data.draw(lengths))
    for _ in range(60):
        sequence, num_outputs = line.admit(), data.draw(outputs)
        tenant, cost = sequence.request.context.tenant, sequence.num_prompt + num_outputs
        line.queue.charge(tenant, num_outputs)
        line.add(tenant, length=data.draw(lengths))
        largest = max(largest, cost)
        got[tenant] += cost
        history.append(dict(got))
    for one, other in itertools.combinations(tenants, 2):
        apart = [0] + [tokens[one] - tokens[other] for tokens in history]
        assert max(map(abs, apart)) <= quantum + largest
        assert max(apart) - min(apart) <= quantum + 2 * largest


def test_finding_the_head_looks_at_the_first_of_each_line_only():
    num_looks = itertools.count()

    class Watched(SimpleNamespace):
        @property
        def level(self):
            next(num_looks)

    line = Line()
    for order in range(4000):
        context = RequestContext(tenant="abcd"[order % 4], priority=(BATCH, INTERACTIVE)[order // 4 % 2])
        line.queue.add(Watched(order=order, passed_over_seconds=0.0, request=SimpleNamespace(context=context)))
    assert line.queue.head().order == 4
    assert next(num_looks) == 2 * 8


# Everything at once.


class WaitingQueueAgainstModel(RuleBasedStateMachine):
    """Sequences arrive, are admitted, preempted and aborted while time passes; the model looks at every sequence and goes round tenant by
    tenant, a quantum a visit."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.admitted_at: dict[Sequence, int] = {}
        # Lines, by tenant and priority, that were passed over since they were served: since when, and by what level at best.
        self.overtaken: dict[tuple[str, int], tuple[float, int]] = {}
        self.passed_over: dict[Sequence, float] = {}  # seconds before they were admitted
        self.turns: list[str] = []  # tenants that wait, the next first
        self.deficits: dict[str, int] = {}

    def first(self, sequence: Sequence) -> Sequence:
        return min((other for other in self.waiting if other.request.context == sequence.request.context), key=lambda s: s.order)

    def level(self, sequence: Sequence) -> int:
        context, first = sequence.request.context, self.first(sequence)
        since, best = self.overtaken.get((context.tenant, context.priority), (self.line.now, context.priority))
        num_levels = (self.passed_over.get(first, 0.0) + self.line.now - since) // AGEING
        return max(context.priority - int(num_levels), min(best, self.admitted_at.get(first, context.priority)))

    def expected_head(self) -> tuple[Sequence, list[str], dict[str, int]]:
        """The head, and the turns and deficits as they are once it is admitted."""
        levels = {sequence: self.level(sequence) for sequence in self.waiting}
        best = min(levels.values())
        contenders = {sequence.request.context.tenant for sequence in self.waiting if levels[sequence] == best}
        turns, deficits = list(self.turns), dict(self.deficits)
        tenant = next((t for t in turns if t in contenders and deficits.get(t, 0) > 0), None)
        while tenant is None:
            visited = next(t for t in turns if t in contenders)
            deficits[visited] = deficits.get(visited, 0) + QUANTUM
            if deficits[visited] > 0:
                tenant = visited
            else:
                turns.remove(visited)
                turns.append(visited)
        candidates = [s for s in self.waiting if levels[s] == best and s.request.context.tenant == tenant]
        return min(candidates, key=lambda s: s.order), turns, deficits

    def charge(self, tenant: str, num_tokens: int) -> None:
        before = self.deficits.get(tenant, 0)
        self.deficits[tenant] = before - num_tokens
        if not set(self.turns) - {tenant}:  # it deprives nobody
            self.deficits[tenant] = max(self.deficits[tenant], min(before, 0))
        if before > 0 >= self.deficits[tenant] and tenant in self.turns:  # its turn is over
            self.turns.remove(tenant)
            self.turns.append(tenant)

    def leave(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        context = sequence.request.context
        if not any(other.request.context == context for other in self.waiting):
            self.overtaken.pop((context.tenant, context.priority), None)
        if not any(other.request.context.tenant == context.tenant for other in self.waiting):
            self.turns.remove(context.tenant)
            self.deficits[context.tenant] = min(0, self.deficits.get(context.tenant, 0))
        if not self.waiting:
            self.deficits.clear()

    def come(self, sequence: Sequence) -> None:
        self.line.queue.add(sequence)
        self.waiting.append(sequence)
        if sequence.request.context.tenant not in self.turns:
            self.turns.append(sequence.request.context.tenant)

    @rule(tenant=st.sampled_from("abc"), priority=st.sampled_from([-1, 0, 0, 2]), length=st.integers(1, 300))
    def arrive(self, tenant: str, priority: int, length: int) -> None:
        self.come(make(tenant, priority, length))

    @precondition(lambda self: self.waiting)
    @rule(num_tokens=st.none() | st.integers(0, 300))
    def admit(self, num_tokens: int | None) -> None:
        head, turns, deficits = self.expected_head()
        tenant, priority = head.request.context.tenant, head.request.context.priority
        levels = {other: self.level(other) for other in self.waiting}
        self.line.queue.pop(head, num_tokens)
        for other in self.waiting:
            if levels[other] > levels[head]:
                line = other.request.context.tenant, other.request.context.priority
                since, best = self.overtaken.get(line, (self.line.now, levels[head]))
                self.overtaken[line] = since, min(best, levels[head])
        since, _ = self.overtaken.pop((tenant, priority), (self.line.now, 0))
        self.passed_over[head] = self.passed_over.get(head, 0.0) + self.line.now - since
        self.turns, self.deficits = turns, deficits
        self.charge(tenant, len(head.token_ids) if num_tokens is None else num_tokens)
        self.leave(head)
        self.running.append(head)
        self.admitted_at[head] = levels[head]
        assert head.level == levels[head]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), num_tokens=st.sampled_from([1, 60, 250, 900]))
    def put_out_tokens(self, which: int, num_tokens: int) -> None:
        tenant = self.running[which % len(self.running)].request.context.tenant
        self.line.queue.charge(tenant, num_tokens)
        self.charge(tenant, num_tokens)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        self.come(self.running.pop(which % len(self.running)))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        sequence = self.waiting[which % len(self.waiting)]
        self.line.queue.remove(sequence)
        self.leave(sequence)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.line.now += seconds

    @invariant()
    def the_head_is_the_models(self) -> None:
        assert self.line.queue.head() is (self.expected_head()[0] if self.waiting else None)

    @invariant()
    def levels_are_the_models(self) -> None:
        assert {s: self.line.queue.level(s) for s in self.waiting} == {s: self.level(s) for s in self.waiting}

    @invariant()
    def just_those_wait_that_should(self) -> None:
        assert list(self.line.queue) == sorted(self.waiting, key=lambda s: s.order)
        assert len(self.line.queue) == len(self.waiting)
        assert all(s in self.line.queue for s in self.waiting)
        assert not any(s in self.line.queue for s in self.running)


TestWaitingQueueAgainstModel = WaitingQueueAgainstModel.TestCase
TestWaitingQueueAgainstModel.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
