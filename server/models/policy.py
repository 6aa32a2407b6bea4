"""Which of several models are awake: state in, decision out. No clock, no engine, no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model as the policy sees it. Times are seconds of one clock."""

    name: str
    num_bytes: int  # of weights and KV pages on a device while it is awake
    is_awake: bool
    num_running: int = 0  # requests that were let in and have not ended
    waiting_since: float | None = None  # when the request came that has waited longest to be let in
    last_used: float = 0.0  # when a request last came in or ended
    woken_at: float = 0.0
    wake_seconds: float = 0.0  # how long waking it took
    is_pinned: bool = False  # it can't be put to sleep


@dataclass(frozen=True, slots=True)
class Limits:
    """`room`: bytes on a device for the models that are awake. `turn`: seconds; as long a busy model stays awake
    though requests wait for another, and as long these wait before it takes no more."""

    room: int
    turn: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One change at most: the next follows from the state after it. A model that is awake and not among `closed` takes
    requests."""

    sleep: str | None = None
    wake: str | None = None
    refuse: str | None = None  # there will be no room for it: its requests can only be refused
    closed: frozenset[str] = frozenset()
    look_at: float | None = None  # when time alone will change the decision


def decide(models: Sequence[ModelState], limits: Limits, now: float) -> Decision:
    """What is to be done next. The model whose request has waited longest is woken first; there is room for it, or
    others make room: those without requests, the least recently used first, and where these are not enough, busy ones
    after their turn, the one longest awake first. A busy model is never put to sleep: it takes no more requests until
    it has none. Meanwhile others are woken that take no room from it.

    Within its turn a model without requests stays for as long as waking it took: its next request may be on its way,
    and changing twice costs more than that wait."""
    asleep = sorted([model for model in models if not model.is_awake and model.waiting_since is not None], key=_since)
    if not asleep:
        return Decision()
    wanted, *later = asleep
    awake = [model for model in models if model.is_awake]
    free = limits.room - sum(model.num_bytes for model in awake)
    missing = wanted.num_bytes - free
    if missing <= 0:
        return Decision(wake=wanted.name)
    idle = [model for model in awake if not model.is_pinned and not _is_busy(model)]
    busy = [model for model in awake if not model.is_pinned and _is_busy(model)]
    leaving = _enough([*sorted(idle, key=lambda model: model.last_used), *sorted(busy, key=lambda model: model.woken_at)], missing)
    if not leaving:
        return Decision(refuse=wanted.name)
    spare = min(free, sum(model.num_bytes for model in leaving) - missing)
    beside = next((model.name for model in later if model.num_bytes <= spare), None)
    woken_last = max((model.woken_at for model in leaving if _is_busy(model)), default=None)
    if woken_last is None:
        first = leaving[0]
        stays = min(first.last_used + first.wake_seconds, first.woken_at + limits.turn)
        return Decision(wake=beside, look_at=stays) if now < stays else Decision(sleep=first.name)
    turn_ends = max(woken_last, _since(wanted)) + limits.turn
    if now < turn_ends:
        return Decision(wake=beside, look_at=turn_ends)
    done = next((model.name for model in leaving if not model.num_running), None)
    return Decision(sleep=done, wake=None if done else beside, closed=frozenset(model.name for model in leaving))


def _is_busy(model: ModelState) -> bool:
    """Awake, it has requests, or some that it would take at once."""
    return model.num_running > 0 or model.waiting_since is not None


def _since(model: ModelState) -> float:
    assert model.waiting_since is not None
    return model.waiting_since


def _enough(models: Sequence[ModelState], missing: int) -> list[ModelState]:
    """The first of these that free so many bytes together, but for those that the others make superfluous. Empty if
    all are too few."""
    chosen: list[ModelState] = []
    for model in models:
        chosen.append(model)
        if sum(one.num_bytes for one in chosen) >= missing:
            break
    else:
        return []
    for model in list(chosen):
        if sum(one.num_bytes for one in chosen) - model.num_bytes >= missing:
            chosen.remove(model)
    return chosen
