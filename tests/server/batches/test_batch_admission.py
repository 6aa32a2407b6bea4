"""Lines go to the engine in the room that others leave, and no more of them than it takes up."""

import asyncio

import pytest

from server.batches.batch_admission import BatchAdmission
from server.batches.lines import BatchLine
from tests.server.batches.conftest import TEXT
from tests.server.fakes import FakeBackend

LINE = BatchLine(custom_id="a", method="POST", url="/v1/completions", body=TEXT)


def line_of(**fields):
    return LINE.model_copy(update={"body": TEXT | fields})


class Scene:
    """Lines that have come, by name, and those that were let in; the engine's gauges are the test's to set."""

    def __init__(self, backend):
        self.backend, self.stats = backend, backend.stats()
        self.is_open = True
        self.admission = BatchAdmission(backend, lambda: self.is_open)
        self.inside = {}

    async def __aenter__(self):
        self.running = asyncio.create_task(self.admission.run())
        return self

    async def __aexit__(self, *_):
        self.running.cancel()

    def come(self, count, line=LINE, name=""):
        async def enter(name):
            self.inside[name] = await self.admission.enter(line)

        return [asyncio.create_task(enter(f"{name}{n}")) for n in range(count)]

    async def settle(self):
        await asyncio.sleep(0.05)  # more than one look at the engine
        return len(self.inside)

    def arrive(self, count):
        """The engine's gauges count the lines that were let in."""
        self.stats.num_requests += count
        self.stats.num_running += count

    def leave(self, count):
        for name in list(self.inside)[:count]:
            self.admission.leave(self.inside.pop(name))
        self.stats.num_running -= count


def scene(run, batch_size=32):
    def test(tokenizer):
        backend = FakeBackend(tokenizer)
        backend.max_batch_size = batch_size

        async def main():
            async with Scene(backend) as made:
                await run(made)

        asyncio.run(main())

    test.__doc__ = run.__doc__
    return test


@scene
async def test_few_wait_until_the_engine_has_taken_them_up(it):
    it.come(100)
    assert await it.settle() == 2
    it.stats.num_requests += 2  # seen, and still waiting there
    it.stats.num_waiting += 2
    assert await it.settle() == 2
    it.stats.num_waiting -= 2
    it.stats.num_running += 2
    assert await it.settle() == 4


@scene
async def test_an_eighth_of_the_batch_stays_free(it):
    it.come(100)
    count = 0
    for _ in range(18):
        now = await it.settle()
        it.arrive(now - count)
        count = now
    assert count == 28
    it.leave(3)
    assert await it.settle() == 27
    it.arrive(2)
    assert await it.settle() == 28


@scene
async def test_others_requests_take_the_room(it):
    it.stats.num_running = 27
    it.come(5)
    assert await it.settle() == 1
    it.arrive(1)
    assert await it.settle() == 1
    it.stats.num_running -= 1
    assert await it.settle() == 2


@scene
async def test_none_enters_while_others_wait(it):
    it.stats.num_waiting = 2
    it.come(2)
    assert await it.settle() == 0
    it.stats.num_waiting = 0
    assert await it.settle() == 2


@scene
async def test_lines_with_errors_never_reach_the_engine_and_block_none(it):
    it.come(10)
    for _ in range(5):
        assert await it.settle() == 2
        it.leave(2)
        it.stats.num_running = 0


@scene
async def test_a_line_of_many_sequences_counts_as_many(it):
    it.come(10, line_of(n=6, prompt=["a", "b"]))
    assert await it.settle() == 1  # its two prompts wait
    it.stats.num_requests += 2
    it.stats.num_running += 12
    assert await it.settle() == 2
    it.stats.num_requests += 2
    it.stats.num_running += 12
    assert await it.settle() == 2  # 24 of 28


@scene
async def test_a_line_of_more_than_there_is_needs_half_of_it_free(it):
    it.stats.num_running = 15
    it.come(1, line_of(prompt=["a"] * 100))
    assert await it.settle() == 0
    it.stats.num_running = 14
    assert await it.settle() == 1


@scene
async def test_in_turn_and_none_overtakes(it):
    it.stats.num_running = 20
    it.come(1, line_of(n=10), "large")
    await asyncio.sleep(0)
    it.come(1, LINE, "small")
    assert await it.settle() == 0
    it.stats.num_running = 17
    await it.settle()
    assert list(it.inside) == ["large0", "small0"]


@scene
async def test_closed_it_lets_none_in(it):
    it.is_open = False
    it.come(2)
    assert await it.settle() == 0
    it.is_open = True
    assert await it.settle() == 2


@scene
async def test_one_that_is_cancelled_takes_no_place(it):
    it.is_open = False
    waiting = it.come(60)
    await asyncio.sleep(0)
    for task in waiting[:50]:
        task.cancel()
    it.is_open = True
    assert await it.settle() == 2
    assert set(it.inside) == {"50", "51"}


@scene
async def test_one_cancelled_in_the_moment_it_is_let_in_gives_its_place_back(it):
    [task] = it.come(1)
    await asyncio.sleep(0)
    it.admission._admit()  # it does not know yet
    task.cancel()
    assert await it.settle() == 0
    assert it.admission._num_inside == 0


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_small_batches_take_lines_too(tokenizer, batch_size):
    async def run(it):
        it.come(20)
        count = 0
        for _ in range(10):
            now = await it.settle()
            it.arrive(now - count)
            count = now
        assert count == {1: 1, 2: 2, 8: 7}[batch_size]

    scene(run, batch_size)(tokenizer)
