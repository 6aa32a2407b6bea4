"""LocalBackend: one thread for the engine, one wake-up a step, and nobody left waiting."""

import asyncio
import threading
import types
from contextlib import aclosing, asynccontextmanager

import pytest

from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.request import DEFAULT_CONTEXT, RequestContext, RequestError, SamplingParams
from jaxinfer.segments import Prompt
from server.backend import Overloaded, Unavailable
from server.local_backend import LocalBackend
from tests.server.scripted_engine import ScriptedEngine


@asynccontextmanager
async def running(engine):
    backend = LocalBackend(engine)
    await backend.start()
    try:
        yield backend
    finally:
        engine.may_step.set()
        await asyncio.wait_for(backend.stop(), 5)


async def text_of(backend, request_id, max_tokens=5, n=1, context=DEFAULT_CONTEXT):
    texts = [""] * n
    async for delta in backend.generate(request_id, Prompt.of_tokens([1]), SamplingParams(max_tokens=max_tokens, n=n), context):
        assert delta.request_id == request_id
        texts[delta.index] += delta.text
    return texts


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_many_requests_each_get_their_own_deltas_from_one_thread():
    async def run():
        engine = ScriptedEngine(max_queue_size=100)
        async with running(engine) as backend:
            texts = await asyncio.gather(*[text_of(backend, str(number), 1 + number % 8, n=1 + number % 3) for number in range(30)])
        assert texts == [["abcdefgh"[: 1 + number % 8]] * (1 + number % 3) for number in range(30)]
        assert engine.threads == {"engine"}
        assert engine.aborted == []

    asyncio.run(run())


def test_a_step_wakes_the_event_loop_once_however_many_tokens_it_made():
    async def run():
        engine = ScriptedEngine(max_queue_size=100, batch_size=32)
        loop = asyncio.get_running_loop()
        num_wakes = 0
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counted(callback, *arguments, **keywords):
            nonlocal num_wakes
            num_wakes += threading.current_thread().name == "engine"
            return call_soon_threadsafe(callback, *arguments, **keywords)

        loop.call_soon_threadsafe = counted
        async with running(engine) as backend:
            await asyncio.gather(*[text_of(backend, str(number), 8, n=2) for number in range(16)])
        assert num_wakes == engine.num_steps

    asyncio.run(run())


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_leaving_early_aborts_in_the_engine(how):
    async def run():
        engine = ScriptedEngine()
        async with running(engine) as backend:
            arrived = asyncio.Event()

            async def ask():
                async with aclosing(backend.generate("x", Prompt.of_tokens([1]), SamplingParams(max_tokens=None))) as deltas:
                    async for _ in deltas:
                        arrived.set()
                        if how == "aclose":
                            return

            task = asyncio.create_task(ask())
            await arrived.wait()
            if how == "cancel":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: engine.aborted == ["x"])
            assert await text_of(backend, "y") == ["abcde"]

    asyncio.run(run())


def test_a_bad_request_fails_alone_whenever_it_is_found_out():
    async def run():
        async with running(ScriptedEngine()) as backend:
            for prompt, message in (([], "empty"), ([1] * 301, "found out late")):
                with pytest.raises(RequestError, match=message):
                    async for _ in backend.generate("x", backend.validate(prompt, SamplingParams()), SamplingParams()):
                        pass
            assert await text_of(backend, "y") == ["abcde"]

    asyncio.run(run())


def test_a_burst_at_an_idle_engine_has_its_free_slots_and_the_queue():
    async def run():
        engine = ScriptedEngine(max_queue_size=8, batch_size=32)
        engine.may_step.clear()
        async with running(engine) as backend:
            asked = [asyncio.create_task(text_of(backend, str(number))) for number in range(70)]
            await asyncio.sleep(0.05)
            engine.may_step.set()
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(answer == ["abcde"] for answer in answers) == 32 + 8
        assert sum(isinstance(answer, Overloaded) for answer in answers) == 30

    asyncio.run(run())


def test_a_tenant_that_fills_the_queue_keeps_no_other_out():
    async def run():
        engine = ScriptedEngine(max_queue_size=8)
        engine.stats.num_running = engine.config.schedule.max_batch_size  # no slot is free
        engine.may_step.clear()
        greedy, other = RequestContext(tenant="greedy"), RequestContext(tenant="other")
        async with running(engine) as backend:
            asked = [asyncio.create_task(text_of(backend, f"greedy-{number}", context=greedy)) for number in range(60)]
            await asyncio.sleep(0.05)
            asked += [asyncio.create_task(text_of(backend, f"other-{number}", context=other)) for number in range(5)]
            await asyncio.sleep(0.05)
            with pytest.raises(Overloaded):
                await text_of(backend, "greedy again", context=greedy)
            engine.may_step.set()
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(answer == ["abcde"] for answer in answers[:60]) == 8
        assert [answer == ["abcde"] for answer in answers[60:]] == [True] * 4 + [False]  # its share: half of the queue

    asyncio.run(run())


def test_above_the_queue_bound_requests_are_refused_even_before_the_engine_saw_the_others():
    async def run():
        engine = ScriptedEngine(max_queue_size=4)
        engine.stats.num_running = engine.config.schedule.max_batch_size  # no slot is free
        engine.may_step.clear()
        async with running(engine) as backend:
            asked = [asyncio.create_task(text_of(backend, str(number))) for number in range(4)]
            await asyncio.sleep(0.05)  # the engine took them in and stands in its first step
            with pytest.raises(Overloaded) as error:
                await text_of(backend, "one too many")
            assert error.value.retry_after == 1.0
            engine.may_step.set()
            assert await asyncio.gather(*asked) == [["abcde"]] * 4
            assert await text_of(backend, "later") == ["abcde"]

    asyncio.run(run())


def test_less_urgent_work_that_waits_keeps_nobody_out_until_there_is_twice_as_much():
    async def run():
        engine = ScriptedEngine(max_queue_size=4)
        engine.stats.num_running = engine.config.schedule.max_batch_size  # no slot is free
        engine.may_step.clear()
        async with running(engine) as backend:
            batch, urgent = RequestContext(priority=20), RequestContext()
            asked = [asyncio.create_task(text_of(backend, f"batch-{number}", context=batch)) for number in range(4)]
            await asyncio.sleep(0.05)
            with pytest.raises(Overloaded):
                await text_of(backend, "one batch line too many", context=batch)
            asked += [asyncio.create_task(text_of(backend, f"urgent-{number}", context=urgent)) for number in range(4)]
            await asyncio.sleep(0.05)
            for context in (urgent, batch, RequestContext(priority=-10)):
                with pytest.raises(Overloaded):
                    await text_of(backend, "one too many", context=context)
            engine.may_step.set()
            assert await asyncio.gather(*asked) == [["abcde"]] * 8

    asyncio.run(run())


@pytest.mark.parametrize(("seconds_each", "retry_after"), [(0.0, 1.0), (5.0, 20.0), (1000.0, 120.0)])
def test_retry_after_follows_the_queue_and_the_pace_of_admission(monkeypatch, seconds_each, retry_after):
    """Two requests are admitted in the time given; four then wait, which is as many as may."""
    now = 1000.0
    monkeypatch.setattr("server.local_backend.time", types.SimpleNamespace(monotonic=lambda: now))  # asyncio keeps its own

    async def run():
        nonlocal now
        engine = ScriptedEngine(max_queue_size=4, batch_size=1)
        engine.stats.num_running = engine.config.schedule.max_batch_size  # no slot is free
        async with running(engine) as backend:
            for number in range(2):
                engine.may_step.clear()
                asked = asyncio.create_task(text_of(backend, str(number)))
                await until(lambda: not backend._engine_loop.num_unseen and engine.waiting)
                now += seconds_each
                engine.may_step.set()
                await asked
                now += 3600  # idle, which is no pace
            engine.may_step.clear()
            waiting = [asyncio.create_task(text_of(backend, f"waits-{number}")) for number in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as error:
                await text_of(backend, "one too many")
            assert error.value.retry_after == pytest.approx(retry_after, rel=0.2)
            engine.may_step.set()
            await asyncio.gather(*waiting)

    asyncio.run(run())


def test_who_leaves_the_queue_is_not_waited_for():
    async def run():
        engine = ScriptedEngine()
        async with running(engine) as backend:
            engine.may_step.clear()
            leaving = [asyncio.create_task(text_of(backend, str(number))) for number in range(3)]
            await asyncio.sleep(0.01)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            assert backend._admissions._num_waiting == 0

    asyncio.run(run())


def test_when_the_engine_fails_everyone_is_told():
    async def run():
        engine = ScriptedEngine()
        engine.may_step.clear()
        async with running(engine) as backend:
            asked = [asyncio.create_task(text_of(backend, str(number))) for number in range(3)]
            await asyncio.sleep(0.01)
            engine.error = RuntimeError("out of memory")
            engine.may_step.set()
            async with asyncio.timeout(5):
                results = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(result) for result in results] == [Unavailable] * 3
            assert "RuntimeError: out of memory" in str(results[0])
            assert "out of memory" in backend.failure()
            assert not backend.is_ready()
            with pytest.raises(Unavailable, match="out of memory"):
                await text_of(backend, "later")

    asyncio.run(run())


def test_when_another_process_of_the_engine_is_gone_everyone_is_told_though_the_step_under_way_never_returns():
    async def run():
        engine = ScriptedEngine()
        engine.may_step.clear()
        async with running(engine) as backend:
            asked = [asyncio.create_task(text_of(backend, str(number))) for number in range(3)]
            await asyncio.sleep(0.01)
            engine.lose_process(ProcessLostError("process 1 of 2 is gone"))
            async with asyncio.timeout(2):  # the step waits for 5
                results = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(result) for result in results] == [Unavailable] * 3
            assert "process 1 of 2 is gone" in str(results[0])
            with pytest.raises(Unavailable, match="process 1 of 2 is gone"):
                await text_of(backend, "later")
            engine.may_step.set()

    asyncio.run(run())


def test_stopping_finishes_what_runs_and_refuses_the_rest():
    async def run():
        engine = ScriptedEngine()
        engine.may_step.clear()
        backend = LocalBackend(engine)
        assert not backend.is_ready()
        await backend.start()
        assert backend.is_ready()
        asked = asyncio.create_task(text_of(backend, "x"))
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(backend.stop())
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="shutting down"):
            await text_of(backend, "y")
        assert not engine.is_closed
        engine.may_step.set()
        assert await asked == ["abcde"]
        await asyncio.wait_for(stopping, 5)
        assert engine.is_closed
        assert engine.threads == {"engine"}
        assert not backend._engine_loop._thread.is_alive()

    asyncio.run(run())


def test_an_idle_engine_is_not_stepped():
    async def run():
        engine = ScriptedEngine()
        async with running(engine) as backend:
            await text_of(backend, "x")
            steps = engine.num_steps
            await asyncio.sleep(0.05)
            assert engine.num_steps == steps

    asyncio.run(run())


def test_an_iteration_is_timed_while_it_lasts_and_idleness_is_none():
    async def run():
        engine = ScriptedEngine()
        async with running(engine) as backend:
            await asyncio.sleep(0.05)
            assert backend.iteration_seconds() == 0
            engine.may_step.clear()
            asked = asyncio.create_task(text_of(backend, "a"))
            await asyncio.sleep(0.1)
            assert 0.05 < backend.iteration_seconds() < 5
            engine.may_step.set()
            await asked
            await asyncio.sleep(0.05)
            assert backend.iteration_seconds() == 0

    asyncio.run(run())
