"""WaitingQueue: scheduling order of waiting sequences: by priority with ageing, fair between tenants in tokens. Imports
no JAX."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter

from jaxinfer.sequence import Sequence

_order = attrgetter("order")


@dataclass(slots=True)
class _Line:
    """One tenant's waiting sequences of one priority, oldest first."""

    priority: int
    sequences: list[Sequence] = field(default_factory=list)
    overtaken_at: float | None = None  # when a better level first went ahead, since this line was last served
    overtaken_by: float = math.inf  # the best level that went ahead since then

    def place(self, sequence: Sequence) -> int | None:
        """Index of a sequence; None if it does not wait. Sequences from other engines may have the same order."""
        place = bisect_left(self.sequences, sequence.order, key=_order)
        while place < len(self.sequences) and self.sequences[place].order == sequence.order:
            if self.sequences[place] is sequence:
                return place
            place += 1
        return None


class WaitingQueue:
    """Sequences that wait for pages and a place in the batch.

    Levels: a lower one goes first. A sequence's level is its priority, minus one for each `ageing_seconds` that its
    line has been passed over, down to the best level that was preferred to it. So batch work at 20 is admitted after at
    most 20 such times, however much interactive work at 0 there is; default work overtakes priority work likewise. Only
    the first of a line ages, and from when another was preferred to it: work behind much of its own kind is not
    starving, and a long batch must not become urgent by being long. A sequence keeps the level of its admission: after
    ageing it is not preempted for the kind of work that it waited for. A preempted sequence returns to its place and
    continues to age. Otherwise it would be admitted in every short gap, get nowhere, and be preempted again.

    Tenants with work at the best level are served by deficit round robin (Shreedhar and Varghese, 1996). Output lengths
    are unknown in advance. So a tenant is served while its deficit is positive, and overspending is a debt that its
    next rounds pay: tenants that always have work get tokens within a quantum and a request of each other. More urgent
    work interrupts a tenant's round, which continues afterwards. A tenant with nothing waiting loses the rest of its
    round but keeps its debt, so that pausing pays nothing. What a tenant gets while no other waits is free, and when
    nobody waits at all debts are forgotten.

    `head` takes time in proportion to waiting tenants and priorities, not to sequences.
    """

    def __init__(self, ageing_seconds: float, quantum: int, clock: Callable[[], float] = time.monotonic) -> None:
        assert ageing_seconds > 0, ageing_seconds
        assert quantum > 0, quantum
        self._ageing_seconds = ageing_seconds
        self._quantum = quantum  # tokens
        self._clock = clock
        self._lines: dict[str, dict[int, _Line]] = {}  # by tenant, the next in the round first; then by priority
        self._deficits: dict[str, int] = {}  # tokens; above 0 within its round only

    def __len__(self) -> int:
        return sum(len(line.sequences) for line in self._all_lines())

    def __bool__(self) -> bool:
        return bool(self._lines)  # none is empty: every iteration of the engine asks

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, oldest first."""
        return merge(*(line.sequences for line in self._all_lines()), key=_order)

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._lines.get(sequence.request.context.tenant, {}).get(sequence.request.context.priority)
        return line is not None and line.place(sequence) is not None

    def add(self, sequence: Sequence) -> None:
        """Queue a new or preempted sequence, ahead of all of its tenant and priority that arrived later."""
        context = sequence.request.context
        lines = self._lines.setdefault(context.tenant, {})
        insort(lines.setdefault(context.priority, _Line(context.priority)).sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        context = sequence.request.context
        assert sequence in self, f"sequence {sequence.order} does not wait"
        lines = self._lines[context.tenant]
        line = lines[context.priority]
        waiting, place = line.sequences, line.place(sequence)
        assert place is not None
        del waiting[place]
        if not waiting:
            del lines[context.priority]
        if not lines:
            del self._lines[context.tenant]
            self._deficits[context.tenant] = min(self._deficits.get(context.tenant, 0), 0)
        if not self._lines:
            self._deficits.clear()

    def head(self) -> Sequence | None:
        """The next sequence; None if none waits. Changes nothing."""
        if not self._lines:
            return None
        now = self._clock()
        firsts = self._firsts(min(self._level(line, now) for line in self._all_lines()), now)
        return firsts[min(firsts, key=self._num_visits)]  # ties: the first in the round

    def level(self, sequence: Sequence) -> int:
        """The current level of a waiting sequence's line."""
        context = sequence.request.context
        return self._level(self._lines[context.tenant][context.priority], self._clock())

    def pop(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """Remove an admitted sequence, usually the head. It keeps the level of its admission, and its tenant pays for
        its tokens, or for the `num_tokens` of them that are to be computed."""
        context, now = sequence.request.context, self._clock()
        served = self._lines[context.tenant][context.priority]
        sequence.level = level = self._level(served, now)
        contenders = list(self._firsts(level, now))
        for line in self._all_lines():
            if self._level(line, now) > level:
                line.overtaken_at = now if line.overtaken_at is None else line.overtaken_at
                line.overtaken_by = min(line.overtaken_by, level)
        if served.overtaken_at is not None:
            sequence.passed_over_seconds += now - served.overtaken_at
        served.overtaken_at, served.overtaken_by = None, math.inf
        self._advance_round(context.tenant, contenders)
        self.charge(context.tenant, len(sequence.token_ids) if num_tokens is None else num_tokens)
        self.remove(sequence)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge a tenant for output tokens, and for others that `pop` did not count."""
        deficit = self._deficits.get(tenant, 0)
        others_wait = len(self._lines) > (tenant in self._lines)
        left = deficit - num_tokens if others_wait else max(deficit - num_tokens, min(deficit, 0))
        self._deficits[tenant] = left
        if left <= 0 < deficit:
            self._to_end(tenant)

    def _all_lines(self) -> Iterator[_Line]:
        return (line for lines in self._lines.values() for line in lines.values())

    def _level(self, line: _Line, now: float) -> int:
        first = line.sequences[0]
        seconds = first.passed_over_seconds + (0.0 if line.overtaken_at is None else now - line.overtaken_at)
        best = min(line.overtaken_by, line.priority if first.level is None else first.level)
        return int(max(line.priority - int(seconds / self._ageing_seconds), best))

    def _firsts(self, level: int, now: float) -> dict[str, Sequence]:
        """By tenant, in round order: its oldest sequence at a level or a better one."""
        firsts = {}
        for tenant, lines in self._lines.items():
            heads = [line.sequences[0] for line in lines.values() if self._level(line, now) <= level]
            if heads:
                firsts[tenant] = min(heads, key=_order)
        return firsts

    def _num_visits(self, tenant: str) -> int:
        """How many visits of the round, each with a quantum, a tenant's deficit needs to become positive."""
        deficit = self._deficits.get(tenant, 0)
        return 0 if deficit > 0 else -deficit // self._quantum + 1

    def _advance_round(self, tenant: str, contenders: list[str]) -> None:
        """Advance the round until it visits a tenant. Tenants without contending work are not visited and keep their
        places."""
        num_visits, place = self._num_visits(tenant), contenders.index(tenant)
        if not num_visits:
            return
        for i, other in enumerate(contenders):
            deficit = self._deficits.get(other, 0)
            granted = (num_visits if i <= place else num_visits - 1) * self._quantum
            self._deficits[other] = deficit + granted if i == place else min(deficit + granted, max(deficit, 0))
        rounds_before = contenders[place:] if num_visits > 1 else []
        for other in rounds_before + contenders[:place]:
            self._to_end(other)

    def _to_end(self, tenant: str) -> None:
        if tenant in self._lines:
            self._lines[tenant] = self._lines.pop(tenant)
