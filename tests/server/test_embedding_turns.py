"""LocalBackend with an embedding model: its batches take turns with the engine's steps, and nobody is left waiting."""

import asyncio
import threading

import numpy as np
import pytest

from jaxinfer.encode.text_batching import Embedded, TextReader
from jaxinfer.request import DeviceUsage, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from server.backend import Overloaded, Unavailable
from tests.server.fakes import byte_tokenizer
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_local_backend import running, text_of, until


class ScriptedEncoder:
    """Keeps to the worker's contract: a step makes one text's embedding, which is its first token."""

    def __init__(self, engine):
        tokenizer = byte_tokenizer()
        self.reader = TextReader(tokenizer, tokenizer.vocab_size, 300, 1)
        self.engine, self.jobs, self.aborted, self.turns, self.threads = engine, {}, [], [], set()
        self.may_step = threading.Event()
        self.may_step.set()
        self.error = None

    @property
    def has_work(self):
        return bool(self.jobs)

    def add(self, request_id, token_lists):
        self.threads.add(threading.current_thread().name)
        self.jobs[request_id] = [list(token_lists), []]

    def abort(self, request_id):
        self.aborted.append(request_id)
        return self.jobs.pop(request_id, None) is not None

    def step(self, *, wait, most_in_flight):
        self.threads.add(threading.current_thread().name)
        self.may_step.wait(5)
        if self.error is not None:
            raise self.error
        self.turns.append((self.engine.num_steps, wait, most_in_flight))
        request_id, (waiting, made) = next(iter(self.jobs.items()))
        made.append([waiting.pop(0)[0]])
        if waiting:
            return []
        del self.jobs[request_id]
        return [Embedded(request_id, np.array(made, np.float32), DeviceUsage(0.0, 1.0, 0.0))]


@pytest.fixture
def engine():
    engine = ScriptedEngine()
    engine.shares_mesh = True
    engine.encode = ScriptedEncoder(engine)
    return engine


async def numbers(backend, request_id, count, first=0, tenant="a"):
    texts = [np.array([number], np.int32) for number in range(first, first + count)]
    embedded = await backend.embed(request_id, texts, RequestContext(tenant=tenant))
    return embedded.embeddings[:, 0].tolist()


def test_each_request_gets_its_own_from_the_engines_thread(engine):
    async def run():
        async with running(engine) as backend:
            assert backend.text_reader is engine.encode.reader
            made = await asyncio.gather(*[numbers(backend, str(i), i + 1, 10 * i) for i in range(4)])
        assert made == [list(range(10 * i, 11 * i + 1)) for i in range(4)]
        assert engine.encode.threads == {"engine"}
        assert engine.encode.aborted == []

    asyncio.run(run())


@pytest.mark.parametrize("shares_mesh", [True, False])
def test_beside_decoding_there_is_one_batch_a_step(engine, shares_mesh):
    async def run():
        engine.shares_mesh = shares_mesh
        engine.may_step.clear()
        async with running(engine) as backend:
            text = asyncio.create_task(text_of(backend, "x", max_tokens=20))
            await until(lambda: engine.prompts)
            made = asyncio.create_task(numbers(backend, "e", 30))
            await asyncio.sleep(0.01)
            engine.may_step.set()
            assert await text == ["abcdefghabcdefghabcd"]
            assert await made == list(range(30))
        beside = [turn for turn in engine.encode.turns if turn[0] < 20]
        assert [step for step, _, _ in beside] == sorted({step for step, _, _ in beside})
        assert len(beside) > 15
        assert {how[1:] for how in beside} == {(shares_mesh, 1)}
        assert {how[1:] for how in engine.encode.turns if how[0] == 20} == {(True, 2)}

    asyncio.run(run())


def test_a_request_that_is_cancelled_is_dropped_and_the_others_go_on(engine):
    async def run():
        engine.encode.may_step.clear()
        async with running(engine) as backend:
            first, second = (asyncio.create_task(numbers(backend, name, 3)) for name in ("a", "b"))
            await until(lambda: "a" in engine.encode.jobs)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            engine.encode.may_step.set()
            assert await second == [0, 1, 2]
            await until(lambda: engine.encode.aborted == ["a"])
        assert engine.aborted in ([], ["a"])  # the latter where it had ended already: of no effect there

    asyncio.run(run())


def test_above_the_queue_bound_requests_are_refused_and_others_come_in(engine):
    async def run():
        engine.encode.may_step.clear()
        async with running(engine) as backend:
            asked = [asyncio.create_task(numbers(backend, str(i), 1)) for i in range(4)]
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded) as error:
                await numbers(backend, "one too many", 1)
            assert error.value.retry_after >= 1.0
            engine.encode.may_step.set()
            assert await asyncio.gather(*asked) == [[0]] * 4
            assert await numbers(backend, "later", 1) == [0]

    asyncio.run(run())


def test_above_the_bound_on_texts_requests_are_refused_however_few_they_are(engine, monkeypatch):
    async def run():
        monkeypatch.setattr("server.local_backend.MAX_TEXTS", 10)
        engine.encode.may_step.clear()
        async with running(engine) as backend:
            asked = asyncio.create_task(numbers(backend, "a", 7))
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded):
                await numbers(backend, "b", 4)
            fits = asyncio.create_task(numbers(backend, "c", 3))
            engine.encode.may_step.set()
            assert (await asked, await fits) == (list(range(7)), list(range(3)))
            assert await numbers(backend, "d", 10) == list(range(10))

    asyncio.run(run())


def test_a_tenant_that_fills_the_queue_keeps_out_nobody_else(engine, monkeypatch):
    async def run():
        monkeypatch.setattr("server.local_backend.MAX_TEXTS", 10)
        engine.encode.may_step.clear()
        async with running(engine) as backend:
            asked = [asyncio.create_task(numbers(backend, str(i), 2)) for i in range(4)]
            await asyncio.sleep(0.01)
            for count in (1, 3):  # one request too many, and too many texts
                with pytest.raises(Overloaded):
                    await numbers(backend, "one too many", count)
            asked += [asyncio.create_task(numbers(backend, f"b{i}", 2, tenant="b")) for i in range(2)]
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded):
                await numbers(backend, "b too", 2, tenant="b")
            engine.encode.may_step.set()
            assert await asyncio.gather(*asked) == [[0, 1]] * 6

    asyncio.run(run())


def test_a_failure_ends_every_request(engine):
    async def run():
        engine.encode.error = ValueError("broken")
        async with running(engine) as backend:
            made = await asyncio.gather(*[numbers(backend, str(i), 1) for i in range(2)], return_exceptions=True)
            assert all(isinstance(error, Unavailable) and "broken" in str(error) for error in made)
            with pytest.raises(Unavailable, match="broken"):
                await numbers(backend, "x", 1)
            with pytest.raises(Unavailable, match="broken"):
                async for _ in backend.generate("y", Prompt.of_tokens([1]), SamplingParams()):
                    pass

    asyncio.run(run())


def test_stopping_waits_for_embeddings_and_refuses_new_ones(engine):
    async def run():
        engine.encode.may_step.clear()
        async with running(engine) as backend:
            made = asyncio.create_task(numbers(backend, "a", 2))
            await until(lambda: engine.encode.jobs)
            stopping = asyncio.create_task(backend.stop())
            await asyncio.sleep(0.01)
            assert not stopping.done()
            with pytest.raises(Unavailable, match="shutting down"):
                await numbers(backend, "b", 1)
            engine.encode.may_step.set()
            assert await made == [0, 1]
            await asyncio.wait_for(stopping, 5)
        assert engine.is_closed

    asyncio.run(run())
