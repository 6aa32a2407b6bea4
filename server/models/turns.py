"""ModelTurns: requests for several models in one memory wait until theirs is awake; models are woken and put to sleep
as the policy decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from jaxinfer.config import format_bytes
from server.backend import Unavailable
from server.models.policy import Decision, Limits, decide
from server.models.resident import Resident, Waiter

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0  # what clients are told to wait where a model can't be woken now


class TurnTimeout(Exception):
    """The request's deadline passed while it waited for its model."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """`sleep_level`: see `Engine.sleep`. `most_waiting`: seconds for which a request waits for its model at most."""

    limits: Limits
    sleep_level: int = 1
    most_waiting: float = 300.0


class ModelTurns:
    """Belongs to the event loop. One model changes at a time; the others serve meanwhile."""

    def __init__(self, models: Sequence[Resident], settings: TurnSettings) -> None:
        self._models, self._settings = tuple(models), settings
        self._changed = asyncio.Event()
        self.one_change = asyncio.Lock()  # held while a model is woken or put to sleep
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.failure: str | None = None  # why no model is woken any more

    @property
    def is_open(self) -> bool:
        """Whether it was started and not closed."""
        return self._task is not None and not self._is_stopping

    async def start(self) -> None:
        """Wakes models in their order while there is room; raises what waking raises."""
        for model in self._models:
            model.last_used = time.monotonic()
            if model.num_bytes > self._settings.limits.room - self._num_bytes_awake():
                logger.info("%s starts asleep: it needs %s awake, %s are free", model.name, format_bytes(model.num_bytes), self._free())
                continue
            await model.control.wake()
            model.is_awake, model.woken_at = True, time.monotonic()
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Refuses those who wait and those who come from now on; changes nothing any more."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
        for model in self._models:
            model.refuse(self._refusal())

    @asynccontextmanager
    async def inside(self, model: Resident, deadline: float | None = None) -> AsyncIterator[None]:
        """A request's time, from when its model is awake and takes it. `deadline`: time.monotonic(). Raises
        `TurnTimeout` after it, and `Unavailable` where the model can't be woken."""
        await self._enter(model, deadline)
        try:
            yield
        finally:
            model.leave(time.monotonic())
            self.look()

    async def _enter(self, model: Resident, deadline: float | None) -> None:
        if self._is_stopping:
            raise self._refusal()
        if model.is_kept_asleep:
            raise Unavailable(model.asleep_by_hand)
        now = time.monotonic()
        waiter = model.wait(now)
        self.look()
        ends = now + self._settings.most_waiting
        try:
            if not waiter.entered.done():
                await asyncio.wait([waiter.entered], timeout=max(0.0, min(ends, ends if deadline is None else deadline) - now))
        except asyncio.CancelledError:
            self._give_up(model, waiter)
            raise
        if waiter.entered.done():
            waiter.entered.result()
            return
        self._give_up(model, waiter)
        if deadline is not None and deadline <= ends:
            raise TurnTimeout
        waited = f"{self._settings.most_waiting:g} s (--models-wait)"
        raise Unavailable(f"the model {model.name} had no turn within {waited}: others have the memory", RETRY_SECONDS)

    def _refusal(self) -> Unavailable:
        return Unavailable(self.failure or "the server is shutting down")

    def _give_up(self, model: Resident, waiter: Waiter) -> None:
        if not waiter.entered.done():
            model.waiting.remove(waiter)
        elif waiter.entered.exception() is None:  # it was let in, and cancelled before it knew
            model.leave(time.monotonic())
        self.look()

    def look(self) -> None:
        """Something has changed: let in who may go on, and let the task see to the rest."""
        if not self._is_stopping:
            self._decide()
            self._changed.set()

    def _decide(self) -> Decision:
        """The decision, with those let in whom it lets in."""
        now = time.monotonic()
        decision = decide(
            [model.state() for model in self._models if not model.is_kept_asleep or model.is_awake], self._settings.limits, now
        )
        for model in self._models:
            is_open = model.is_awake and not model.is_changing and model.name not in decision.closed
            if is_open and decision.sleep != model.name:
                model.let_in(now)
        return decision

    async def _run(self) -> None:
        try:
            await self._take_turns()
        except Exception as error:
            logger.critical("models take no turns any more; nothing is served until a restart", exc_info=error)
            self.failure = f"models can't take turns ({type(error).__name__}: {error}); restart the server"
            self.close()

    async def _take_turns(self) -> None:
        while True:
            self._changed.clear()
            async with self.one_change:
                decision = self._decide()
                if await self._carry_out(decision):
                    continue
            timeout = None if decision.look_at is None else max(0.0, decision.look_at - time.monotonic())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)

    async def _carry_out(self, decision: Decision) -> bool:
        """Whether there was anything to do."""
        for model in self._models:
            if model.name == decision.sleep:
                await self._put_to_sleep(model)
                return True
            if model.name == decision.wake:
                await self._wake(model)
                return True
            if model.name == decision.refuse:
                needed, free = format_bytes(model.num_bytes), self._free()
                message = f"the model {model.name} sleeps, and can't be woken: it needs {needed}, and {free} can be had"
                model.refuse(Unavailable(message, RETRY_SECONDS))
                return True
        return False

    async def _put_to_sleep(self, model: Resident) -> None:
        level, now = self._settings.sleep_level, time.monotonic()
        model.is_changing = True
        try:
            await model.control.sleep(level, "pause")  # there is nothing to pause
            model.is_awake = False
            model.num_sleeps += 1
            idle, took = now - model.last_used, time.monotonic() - now
            logger.info("%s sleeps (level %d), unused for %.1f s; it took %.2f s", model.name, level, idle, took)
        except Exception as error:
            model.is_pinned = True  # its memory is not to be had
            logger.exception("%s can't be put to sleep, and stays where it is: %s", model.name, error)
        finally:
            model.is_changing = False

    async def _wake(self, model: Resident) -> None:
        now, num_waiting = time.monotonic(), len(model.waiting)
        model.is_changing = model.is_awake = True  # its memory is taken from now on
        model.woken_at = now
        try:
            if model.new_weights is None:
                await model.control.wake()
            else:
                await model.control.update_weights(model.new_weights, "pause")
                model.new_weights = None
            model.num_wakes += 1
            model.woken_at = model.last_used = time.monotonic()
            model.wake_seconds = model.woken_at - now
            logger.info(
                "%s is awake, requests waiting: %d; it took %.2f s; awake now: %s; %s free",
                *(model.name, num_waiting, model.wake_seconds, ", ".join(one.name for one in self._models if one.is_awake), self._free()),
            )
        except Exception as error:
            model.is_awake = False
            logger.exception("%s can't be woken; its %d waiting requests are refused: %s", model.name, len(model.waiting), error)
            refusal = Unavailable(f"the model {model.name} sleeps, and can't be woken: {error}", RETRY_SECONDS)
            refusal.__cause__ = error
            model.refuse(refusal)
        finally:
            model.is_changing = False

    def _num_bytes_awake(self) -> int:
        return sum(model.num_bytes for model in self._models if model.is_awake)

    def _free(self) -> str:
        return format_bytes(self._settings.limits.room - self._num_bytes_awake())
