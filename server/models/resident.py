"""Resident: one of several models in a memory that may not hold them all: who waits for it, who uses it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from server.backend import Backend, WeightControl
from server.models.policy import ModelState


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A request that waits for its model since then, in seconds of time.monotonic(). `entered`: done once it was let
    in; with an error where it is refused."""

    since: float
    entered: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Resident:
    """Mutable, and the event loop's. `num_bytes`: on a device while it is awake. `backend`: its engine's.
    `is_kept_asleep`: it was put to sleep by hand, and requests don't wake it. `is_pinned`: it can't be put to sleep."""

    name: str
    num_bytes: int
    backend: Backend
    is_awake: bool = False
    is_changing: bool = False  # it is being woken, or put to sleep
    is_kept_asleep: bool = False
    is_pinned: bool = False
    new_weights: str | None = None  # that it wakes with, in place of those it had
    waiting: deque[Waiter] = field(default_factory=deque)
    num_running: int = 0
    last_used: float = 0.0
    woken_at: float = 0.0
    wake_seconds: float = 0.0  # how long waking it took the last time
    num_wakes: int = 0  # for requests
    num_sleeps: int = 0  # to make room
    is_quiet: asyncio.Event = field(default_factory=asyncio.Event)  # no request was let in that has not ended

    def __post_init__(self) -> None:
        self.is_quiet.set()

    @property
    def control(self) -> WeightControl:
        """Of its engine, which was started."""
        found = self.backend.weight_control()
        assert found is not None
        return found

    @property
    def asleep_by_hand(self) -> str:
        """What requests are told meanwhile."""
        return f"the model {self.name} is asleep: wake it with POST /v1/models/{self.name}/wake"

    @property
    def status(self) -> str:
        """As `/ready` names it."""
        if self.is_changing:
            return "changing"
        return "awake" if self.is_awake else "asleep"

    def state(self) -> ModelState:
        """As the policy sees it."""
        return ModelState(
            self.name,
            self.num_bytes,
            self.is_awake,
            self.num_running,
            self.waiting[0].since if self.waiting else None,
            self.last_used,
            self.woken_at,
            self.wake_seconds,
            self.is_pinned,
        )

    def wait(self, now: float) -> Waiter:
        """A request has come."""
        waiter = Waiter(now, asyncio.get_running_loop().create_future())
        self.waiting.append(waiter)
        return waiter

    def let_in(self, now: float) -> None:
        """All who wait go on."""
        while self.waiting:
            self.waiting.popleft().entered.set_result(None)
            self.num_running += 1
            self.last_used = now
            self.is_quiet.clear()

    def refuse(self, error: Exception) -> None:
        """All who wait get this error."""
        while self.waiting:
            self.waiting.popleft().entered.set_exception(error)

    def leave(self, now: float) -> None:
        """A request that was let in has ended."""
        self.num_running -= 1
        self.last_used = now
        if not self.num_running:
            self.is_quiet.set()
