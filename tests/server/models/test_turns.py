"""ModelTurns over engines that only keep books: nobody is lost or waits for ever, no busy model sleeps, memory is kept."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from checkpoints.source import CheckpointError
from jaxinfer.stats import EngineStats
from server.backend import InFlight, Unavailable
from server.models.model_weight_control import ModelWeightControl
from server.models.policy import Limits
from server.models.resident import Resident
from server.models.turns import ModelTurns, TurnSettings, TurnTimeout


class Books:
    """The weight control of a model, which checks each call. Changes take a moment, as they do."""

    def __init__(self, name: str, num_bytes: int, all_books: list[Books], room: int) -> None:
        self.stats = EngineStats(is_asleep=True)
        backend = SimpleNamespace(weight_control=lambda: self, stats=lambda: self.stats)
        self.resident = Resident(name, num_bytes, backend)
        self._all, self._room = all_books, room
        self.error: Exception | None = None
        self.num_inside = 0
        self.levels: list[int] = []
        all_books.append(self)

    async def sleep(self, level: int, in_flight: InFlight) -> None:
        await self._change()
        assert not self.num_inside or self.resident.is_kept_asleep
        self.stats.is_asleep = True
        self.levels.append(level)

    async def wake(self) -> None:
        await self._change()
        self.stats.is_asleep = False
        assert sum(one.resident.num_bytes for one in self._all if not one.stats.is_asleep) <= self._room

    async def update_weights(self, model: str, in_flight: InFlight) -> int:
        await asyncio.sleep(0.001)
        if model == "wrong":
            raise CheckpointError("wrong: another model")
        self.stats.is_asleep = False
        self.stats.weights_version += 1
        return self.stats.weights_version

    async def _change(self) -> None:
        await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def turns_of(
    sizes: Sequence[int], turn: float = 0.02, most_waiting: float = 10.0, level: int = 1
) -> AsyncIterator[tuple[ModelTurns, list[Books]]]:
    """Of models a, b, ... of these sizes, in a room of 10."""
    books: list[Books] = []
    for name, size in zip("abcdef", sizes, strict=False):
        Books(name, size, books, 10)
    turns = ModelTurns([one.resident for one in books], TurnSettings(Limits(10, turn), level, most_waiting))
    await turns.start()
    async with asyncio.timeout(20):
        yield turns, books
    turns.close()


async def use(turns: ModelTurns, model: Books, seconds: float = 0.0, deadline: float | None = None) -> float:
    """When it was let in."""
    async with turns.inside(model.resident, deadline):
        assert not model.stats.is_asleep
        entered = time.monotonic()
        model.num_inside += 1
        try:
            await asyncio.sleep(seconds)
            assert not model.stats.is_asleep
        finally:
            model.num_inside -= 1
    return entered


def awake(books: Sequence[Books]) -> str:
    return "".join(one.resident.name for one in books if not one.stats.is_asleep)


def test_those_that_fit_start_awake_and_the_least_recently_used_make_room() -> None:
    async def run() -> None:
        async with turns_of([4, 4, 4, 2], level=2) as (turns, books):
            a, b, c, _ = books
            assert awake(books) == "abd"
            await use(turns, b)
            await use(turns, a)
            await use(turns, c)  # d was never used
            assert awake(books) == "acd", "b is the least recently used that frees enough"
            assert b.levels == [2]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_random_requests_with_deadlines_and_disconnects_all_end(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        async with turns_of([4, 6, 7, 10]) as (turns, books):
            tasks = []
            for _ in range(300):
                deadline = time.monotonic() + rng.uniform(0, 0.2) if rng.random() < 0.2 else None
                tasks.append(asyncio.create_task(use(turns, rng.choice(books), rng.uniform(0, 0.01), deadline)))
                if rng.random() < 0.2:
                    rng.choice(tasks).cancel()
                await asyncio.sleep(rng.uniform(0, 0.003))
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for model in books:
                assert model.resident.num_running == 0
                assert not model.resident.waiting
            assert all(isinstance(end, float | TurnTimeout | asyncio.CancelledError) for end in ended), ended
            assert sum(isinstance(end, float) for end in ended) > 150
            assert all(model.resident.num_wakes > 1 for model in books)

    asyncio.run(run())


def test_a_busy_model_never_sleeps_and_gives_way_after_its_turn() -> None:
    """Clients that ask `a` without a pause: `b` is let in soon after `a` had its turn, and `a` again after it."""

    async def run() -> None:
        async with turns_of([8, 8], turn=0.1) as (turns, (a, b)):
            is_over = False

            async def client() -> list[float]:
                entries = []
                while not is_over:
                    entries.append(await use(turns, a, 0.01))
                return entries

            clients = [asyncio.create_task(client()) for _ in range(4)]
            await asyncio.sleep(0.02)
            asked = time.monotonic()
            entered = await use(turns, b, 0.05)
            assert entered - asked >= 0.09
            await asyncio.sleep(0.1)
            is_over = True
            entries = sorted(entry for of_client in await asyncio.gather(*clients) for entry in of_client)
            assert max(entries) > entered
            assert not any(entered <= entry < entered + 0.05 for entry in entries)

    asyncio.run(run())


def test_a_wait_has_an_end() -> None:
    async def run() -> None:
        async with turns_of([8, 8], most_waiting=0.05) as (turns, (a, b)):
            async with turns.inside(a.resident):
                with pytest.raises(TurnTimeout):
                    await use(turns, b, deadline=time.monotonic() + 0.01)
                with pytest.raises(Unavailable, match=r"had no turn within 0\.05 s") as refused:
                    await use(turns, b)
                assert refused.value.retry_after is not None
            assert not b.resident.waiting
            await use(turns, b)

    asyncio.run(run())


def test_a_model_that_cannot_be_woken_refuses_those_who_wait_and_is_tried_again() -> None:
    async def run() -> None:
        async with turns_of([4, 8]) as (turns, (a, b)):
            b.error = OSError("the disk is gone")
            for _ in range(2):
                with pytest.raises(Unavailable, match="the disk is gone") as refused:
                    await use(turns, b)
                assert refused.value.retry_after is not None
            await use(turns, a)
            b.error = None
            await use(turns, b)

    asyncio.run(run())


def test_a_model_that_cannot_sleep_keeps_its_memory_and_goes_on() -> None:
    async def run() -> None:
        async with turns_of([8, 8]) as (turns, (a, b)):
            a.error = RuntimeError("its engine has failed")
            with pytest.raises(Unavailable, match=r"needs 8 B, and 2 B"):
                await use(turns, b)
            await use(turns, a)

    asyncio.run(run())


def test_by_hand_a_model_sleeps_until_it_is_woken_by_hand() -> None:
    async def run() -> None:
        async with turns_of([8, 8]) as (turns, books):
            a, b = books
            by_hand = ModelWeightControl(turns, a.resident)
            under_way = asyncio.create_task(use(turns, a, 0.02))
            await asyncio.sleep(0.005)
            await by_hand.sleep(1, "finish")
            assert under_way.done()
            with pytest.raises(Unavailable, match="/v1/models/a/wake"):
                await use(turns, a)
            await use(turns, b)
            await by_hand.wake()
            assert awake(books) == "a"
            assert await by_hand.update_weights("folder", "finish") == 2

    asyncio.run(run())


def test_a_model_that_sleeps_wakes_with_the_weights_it_is_given() -> None:
    """Those before may be gone. Weights that don't fit are its caller's error, and it stays asleep."""

    async def run() -> None:
        async with turns_of([8, 8]) as (turns, books):
            a, b = books
            by_hand = ModelWeightControl(turns, b.resident)
            b.error = CheckpointError("the folder is gone")
            with pytest.raises(Unavailable, match="the folder is gone"):
                await use(turns, b)
            with pytest.raises(CheckpointError, match="wrong: another model"):
                await by_hand.update_weights("wrong", "finish")
            assert awake(books) == ""
            assert await by_hand.update_weights("folder", "finish") == 2
            assert awake(books) == "b"
            b.error = None
            await use(turns, a)
            await asyncio.gather(by_hand.update_weights("one", "finish"), by_hand.update_weights("two", "pause"))
            assert b.stats.weights_version == 4

    asyncio.run(run())


def test_at_the_end_those_who_wait_are_told() -> None:
    async def run() -> None:
        async with turns_of([8, 8]) as (turns, (a, b)):
            async with turns.inside(a.resident):
                waiting = asyncio.create_task(use(turns, b))
                await asyncio.sleep(0.01)
                turns.close()
                with pytest.raises(Unavailable, match="shutting down"):
                    await waiting
            with pytest.raises(Unavailable, match="shutting down"):
                await use(turns, a)

    asyncio.run(run())


def test_a_fault_in_taking_turns_is_told_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with turns_of([8, 8]) as (turns, (a, b)):
            async with turns.inside(a.resident):
                waiting = asyncio.create_task(use(turns, b))
                await asyncio.sleep(0.01)
                monkeypatch.setattr("server.models.turns.decide", lambda *_: 1 / 0)
                turns._changed.set()
                with pytest.raises(Unavailable, match="ZeroDivisionError"):
                    await waiting
            assert turns.failure is not None
            with pytest.raises(Unavailable, match="restart the server"):
                await use(turns, a)

    asyncio.run(run())
