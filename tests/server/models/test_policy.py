"""The policy by itself: which model wakes, which one sleeps, who waits; and a run of it under random load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from server.models.policy import Decision, Limits, ModelState, decide

LIMITS = Limits(room=10, turn=5.0)


def awake(name: str, size: int = 4, *, running: int = 0, used: float = 0.0, woken: float = 0.0, waits: float | None = None) -> ModelState:
    return ModelState(name, size, True, running, waits, used, woken)


def asleep(name: str, size: int = 4, *, waits: float | None = None) -> ModelState:
    return ModelState(name, size, False, 0, waits)


@pytest.mark.parametrize(
    ("models", "now", "decision"),
    [
        ([awake("a"), asleep("b")], 0, Decision()),  # nobody waits
        ([awake("a", 6), asleep("b", waits=0)], 0, Decision(wake="b")),  # there is room for both
        ([asleep("a", waits=2), asleep("b", waits=1)], 2, Decision(wake="b")),  # who waits longest
        ([awake("a", used=2), awake("b", used=1), asleep("c", waits=3)], 3, Decision(sleep="b")),  # least recently used
        # A busy one stays though it was used before the idle one.
        ([awake("a", running=1, used=1), awake("b", used=2), asleep("c", waits=3)], 3, Decision(sleep="b")),
        # Within its turn an idle one stays for as long as waking it took, and no longer.
        ([replace(awake("a", 8, used=4, woken=2), wake_seconds=2), asleep("b", waits=3)], 5.5, Decision(look_at=6.0)),
        ([replace(awake("a", 8, used=4, woken=2), wake_seconds=2), asleep("b", waits=3)], 6.0, Decision(sleep="a")),
        ([replace(awake("a", 8, used=6.5, woken=2), wake_seconds=2), asleep("b", waits=3)], 6.6, Decision(look_at=7.0)),
        ([replace(awake("a", 8, used=6.5, woken=2), wake_seconds=2), asleep("b", waits=3)], 7.0, Decision(sleep="a")),
        # Two must go, the least recently used first; one that the other makes superfluous stays.
        ([awake("a", 4, used=2), awake("b", 4, used=1), asleep("c", 10, waits=3)], 3, Decision(sleep="b")),
        ([awake("a", 2, used=1), awake("b", 6, used=2), asleep("c", 8, waits=3)], 3, Decision(sleep="b")),
        # All that could go are busy: their turn first, then they take no more, and sleep once they have none.
        ([awake("a", 8, running=3, woken=1), asleep("b", waits=3)], 7.9, Decision(look_at=8.0)),
        ([awake("a", 8, running=3, woken=1), asleep("b", waits=3)], 8.0, Decision(closed=frozenset("a"))),
        ([awake("a", 8, running=3, woken=6), asleep("b", waits=3)], 8.0, Decision(look_at=11.0)),
        ([awake("a", 8, running=0, woken=1, waits=7), asleep("b", waits=3)], 8.0, Decision(sleep="a", closed=frozenset("a"))),
        # One just woken lets in who waited for it, however long another waits.
        ([awake("a", 8, running=0, woken=8, waits=1), asleep("b", waits=2)], 8.0, Decision(look_at=13.0)),
        # The longest awake goes first.
        ([awake("a", running=1, woken=2), awake("b", running=1, woken=1), asleep("c", waits=0)], 9.0, Decision(closed=frozenset("b"))),
        # A later one is woken meanwhile, where it takes no room from the first.
        ([awake("a", 8, running=1), asleep("b", 6, waits=0), asleep("c", 2, waits=1)], 2.0, Decision(wake="c", look_at=5.0)),
        ([awake("a", 8, running=1), asleep("b", 10, waits=0), asleep("c", 2, waits=1)], 2.0, Decision(look_at=5.0)),
        ([awake("a", 8, running=1), asleep("b", 6, waits=0), asleep("c", 2, waits=1)], 6.0, Decision(wake="c", closed=frozenset("a"))),
        # No room will come.
        ([asleep("a", 11, waits=0)], 0, Decision(refuse="a")),
        ([replace(awake("a", 8), is_pinned=True), asleep("b", waits=0)], 9.0, Decision(refuse="b")),
    ],
)
def test_decisions(models: Sequence[ModelState], now: float, decision: Decision) -> None:
    assert decide(models, LIMITS, now) == decision


@pytest.mark.parametrize("seed", range(20))
def test_under_random_load_memory_is_kept_nobody_busy_sleeps_and_everyone_is_served(seed: int) -> None:
    """Requests for four models that never end their load, in a simulation of seconds."""
    rng = random.Random(seed)
    models = {name: asleep(name, size) for name, size in zip("abcd", (3, 4, 6, 9), strict=True)}
    waiting: dict[str, list[float]] = {name: [] for name in models}
    ends: dict[str, list[float]] = {name: [] for name in models}
    longest = 0.0
    for second in range(400):
        now = float(second)
        for name in models:
            ends[name] = [end for end in ends[name] if end > now]
            if second < 300 and rng.random() < 0.7:
                waiting[name].append(now)
        while True:
            for name, model in models.items():
                since = min(waiting[name], default=None)
                models[name] = replace(model, num_running=len(ends[name]), waiting_since=since)
            decision = decide(list(models.values()), LIMITS, now)
            for name, model in models.items():
                if model.is_awake and name not in decision.closed and name != decision.sleep and waiting[name]:
                    longest = max(longest, now - waiting[name][0])
                    ends[name] += [now + rng.randint(1, 6) for _ in waiting[name]]
                    waiting[name] = []
                    models[name] = replace(model, num_running=len(ends[name]), waiting_since=None, last_used=now)
            if decision.sleep is not None:
                assert not ends[decision.sleep]
                models[decision.sleep] = replace(models[decision.sleep], is_awake=False)
            elif decision.wake is not None:
                models[decision.wake] = replace(models[decision.wake], is_awake=True, woken_at=now)
            else:
                break
            assert sum(model.num_bytes for model in models.values() if model.is_awake) <= LIMITS.room
    assert not any(waiting.values())
    # Each of the others has a turn and the time of its last requests before one's own turn comes.
    assert longest <= 4 * (LIMITS.turn + 6)
