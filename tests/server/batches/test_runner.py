"""The runner asks what has no answer, as the lowest in the queue, whatever fails meanwhile."""

import asyncio
import io
import json
import sqlite3
from contextlib import asynccontextmanager

import numpy as np
import pytest

from server.backend import Overloaded, Unavailable
from server.batches.batch_admission import MAX_EMBEDDING_LINES
from server.batches.batch_store import WINDOW_SECONDS
from server.batches.runner import PRIORITY, BatchRunner
from server.openai.service import Service
from tests.server.batches.conftest import NO_UNICODE, TEXT, TEXTS, line
from tests.server.fakes import ANSWER, embedding

ENDED = ("completed", "failed", "expired", "cancelled")


class Scene:
    """A runner over a store and a fake backend. `is_open`: whether lines may be asked."""

    def __init__(self, backend, tokenizer, config, store):
        self.backend, self.store, self.is_open = backend, store, True
        self.runner = BatchRunner(Service(backend, tokenizer, config, created=0), store, lambda: self.is_open)

    def create(self, *lines, tenant="key-a", endpoint="/v1/completions"):
        file = self.store.files.add(tenant, "in.jsonl", io.BytesIO("\n".join(lines).encode()), None)
        batch = self.store.create(tenant, file.id, endpoint, None, None)
        self.runner.look()
        return batch.id

    @asynccontextmanager
    async def running(self):
        self.runner.start()
        try:
            yield
        finally:
            await self.runner.stop()

    async def until(self, condition):
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it does not come to be")

    async def ended(self, id):
        await self.until(lambda: self.store.read(id).status in ENDED)
        return self.store.read(id)

    def answers(self, batch):
        ids = (batch.output_file_id, batch.error_file_id)
        return [[] if id is None else [json.loads(text) for text in self.store.files.path(id).read_text().splitlines()] for id in ids]


@pytest.fixture
def scene(backend, tokenizer, config, store):
    backend.started = True
    return Scene(backend, tokenizer, config, store)


def run(main):
    asyncio.run(asyncio.wait_for(main, 30))


def test_lines_are_asked_at_the_lowest_priority_for_the_batchs_tenant(scene, backend):
    async def main():
        async with scene.running():
            batch = await scene.ended(scene.create(line("a", body=TEXT | {"priority": -5, "max_tokens": 5}), tenant="key-b"))
        [context] = backend.contexts
        assert (context.priority, context.tenant, context.namespace, context.deadline) == (PRIORITY, "key-b", "key-b", None)
        assert (batch.tenant, batch.output_tokens) == ("key-b", 5)

    run(main())


def test_what_a_line_leaves_out_is_the_models_own_default(scene, backend):
    backend.sampling_defaults = {"temperature": 0.2, "top_k": 20}

    async def main():
        async with scene.running():
            await scene.ended(scene.create(line("a"), line("b", body=TEXT | {"temperature": 0})))
        assert sorted((params.temperature, params.top_k) for _, _, params in backend.seen) == [(0.0, 20), (0.2, 20)]

    run(main())


def test_answers_are_those_of_http_in_the_inputs_order(scene):
    lines = [line(f"c{n}", body=TEXT | {"max_tokens": 1 + n % 7}) for n in range(40)]
    lines[5] = line("c5", body=TEXT | {"max_tokens": -1})
    lines[6] = line("c6", body=TEXT | {"model": "other"})

    async def main():
        async with scene.running():
            output, errors = scene.answers(await scene.ended(scene.create(*lines)))
        assert [answer["custom_id"] for answer in output] == [f"c{n}" for n in range(40) if n not in (5, 6)]
        for answer in output:
            text = answer["response"]["body"]["choices"][0]["text"]
            assert ANSWER.encode()[: 1 + int(answer["custom_id"][1:]) % 7].decode() == text
        assert [(e["custom_id"], e["response"]["status_code"], e["error"]) for e in errors] == [("c5", 400, None), ("c6", 404, None)]
        assert len({answer["id"] for answer in output + errors}) == 40

    run(main())


def test_a_line_that_is_no_unicode_fails_alone(scene, caplog):
    """Before, one in `model` kept its batch validating for ever."""

    async def main():
        async with scene.running():
            batch = await scene.ended(scene.create(line("a"), *NO_UNICODE, line("b")))
        output, errors = scene.answers(batch)
        assert (batch.status, batch.model) == ("completed", "tiny")
        assert [answer["custom_id"] for answer in output] == ["a", "b"]
        assert [answer["custom_id"] for answer in errors] == [json.loads(text)["custom_id"] for text in NO_UNICODE]
        assert {answer["error"]["code"] for answer in errors} == {"invalid_unicode"}
        assert not caplog.records

    run(main())


@pytest.mark.parametrize("broken", ["check_input", "answer_line"])
def test_a_fault_of_the_programs_own_ends_a_batch_and_is_not_tried_again(scene, monkeypatch, caplog, broken):
    module = "batch_store" if broken == "check_input" else "runner"
    calls = []

    def fail(*arguments, **settings):
        calls.append(arguments)
        raise KeyError("a bug")

    async def main():
        monkeypatch.setattr(f"server.batches.{module}.{broken}", fail)
        async with scene.running():
            batch = await scene.ended(scene.create(line("a")))
        assert len(calls) == len(caplog.records) == 1
        if broken == "check_input":
            assert (batch.status, batch.errors[0]["code"]) == ("failed", "internal_error")
        else:
            _, [answer] = scene.answers(batch)
            assert (batch.status, answer["custom_id"], answer["error"]["code"]) == ("completed", "a", "internal_error")

    run(main())


def test_embeddings_are_answered_beside_lines_that_wait_for_the_other_model(scene, backend, tokenizer):
    many = [f"text {n}" for n in range(40)]  # more than are written at once
    bodies = [TEXTS, TEXTS | {"input": many, "dimensions": 3}, TEXTS | {"input": ""}, TEXTS | {"encoding_format": "base64"}]

    async def main():
        backend.hold.clear()  # neither model answers
        async with scene.running():
            others = scene.create(*[line(str(n)) for n in range(30)])
            await scene.until(lambda: backend.num_open == 7)
            batch = scene.create(*[line(f"e{n}", "/v1/embeddings", body) for n, body in enumerate(bodies * 3)], endpoint="/v1/embeddings")
            await scene.until(lambda: backend.num_open == 7 + MAX_EMBEDDING_LINES)
            await asyncio.sleep(0.05)
            assert backend.num_open == 7 + MAX_EMBEDDING_LINES
            backend.hold.set()
            ended = await scene.ended(batch)
            assert (await scene.ended(others)).num_completed == 30
        assert (ended.status, ended.num_completed, ended.num_failed, ended.output_tokens) == ("completed", 9, 3, 0)
        assert ended.input_tokens == 3 * (2 * len("Hithere") + sum(map(len, many)))
        output, errors = scene.answers(ended)
        vectors = [data["embedding"] for data in output[1]["response"]["body"]["data"]]
        expected = np.stack([embedding(tokenizer.encode(text))[:3] for text in many])
        np.testing.assert_allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5)
        assert isinstance(output[2]["response"]["body"]["data"][0]["embedding"], str)
        assert errors[0]["response"]["body"]["error"]["param"] == "input"

    run(main())


def test_never_more_at_once_than_the_engine_decodes(scene, backend):
    async def main():
        backend.hold.clear()
        async with scene.running():
            batches = [scene.create(*[line(str(n)) for n in range(30)]) for _ in range(3)]
            await scene.until(lambda: backend.num_open == 7)  # of 8
            await asyncio.sleep(0.1)
            assert backend.num_open == 7
            backend.hold.set()
            for id in batches:
                assert (await scene.ended(id)).num_completed == 30

    run(main())


def test_batches_take_turns(backend, tokenizer, config, store):
    async def main():
        backend.started, backend.max_batch_size = True, 1
        scene = Scene(backend, tokenizer, config, store)
        scene.is_open = False
        for name in ("a", "b"):
            scene.create(*[line(f"{name}{n}", body=TEXT | {"prompt": name}) for n in range(20)])
        async with scene.running():
            await scene.until(lambda: scene.runner.counts().num_waiting == 40)
            await asyncio.sleep(0.1)  # the first line of each waits for admission
            scene.is_open = True
            await scene.until(lambda: len(backend.seen) == 40)
        asked = tokenizer.decode([prompt[0] for _, prompt, _ in backend.seen])
        assert min(asked[:20].count("a"), asked[:20].count("b")) > 5

    run(main())


def test_the_time_is_over(scene, backend, clock):
    async def main():
        async with scene.running():
            lines = [line("quick", body=TEXT | {"max_tokens": 1})] + [line(f"c{n}") for n in range(20)]
            backend.hold_after = 3
            backend.hold.clear()
            id = scene.create(*lines)
            await scene.until(lambda: scene.store.read(id).num_completed == 1 and backend.num_open == 7)
            clock.seconds += WINDOW_SECONDS - 1
            scene.runner.look()
            await asyncio.sleep(0.1)
            assert scene.store.read(id).status == "in_progress"
            clock.seconds += 1
            scene.runner.look()
            batch = await scene.ended(id)
            assert backend.num_open == 0
            assert len(backend.aborted) == 7
        assert (batch.status, batch.num_completed, batch.num_failed) == ("expired", 1, 20)
        output, errors = scene.answers(batch)
        assert [answer["custom_id"] for answer in output] == ["quick"]
        assert [(e["custom_id"], e["error"]["code"]) for e in errors] == [(f"c{n}", "batch_expired") for n in range(20)]

    run(main())


def test_one_whose_time_passed_while_no_server_ran_is_not_begun(scene, backend, clock):
    async def main():
        id = scene.create(line("a"))
        clock.seconds += WINDOW_SECONDS
        async with scene.running():
            batch = await scene.ended(id)
        assert (batch.status, batch.num_failed, backend.seen) == ("expired", 1, [])

    run(main())


def test_cancelled_it_aborts_what_is_under_way_and_keeps_what_was_answered(scene, backend):
    async def main():
        async with scene.running():
            backend.hold_after = 3
            backend.hold.clear()
            id = scene.create(line("quick", body=TEXT | {"max_tokens": 1}), *[line(f"c{n}") for n in range(20)])
            await scene.until(lambda: scene.store.read(id).num_completed == 1 and backend.num_open == 7)
            scene.store.cancel("key-a", id)
            scene.runner.look()
            batch = await scene.ended(id)
            assert (len(backend.aborted), backend.num_open) == (7, 0)
            backend.hold.set()
            other = await scene.ended(scene.create(*[line(f"c{n}") for n in range(20)]))  # the places are free again
        assert (batch.status, batch.num_completed, batch.num_failed) == ("cancelled", 1, 20)
        assert [answer["custom_id"] for answer in scene.answers(batch)[0]] == ["quick"]
        assert (other.status, other.num_completed) == ("completed", 20)

    run(main())


def test_a_full_queue_and_a_backend_that_is_away_are_no_answers(scene, backend, monkeypatch):
    monkeypatch.setattr("server.batches.runner.RETRY_SECONDS", 0.01)
    refusals = [Overloaded(0.01), Unavailable("away"), Unavailable("away"), Overloaded(0.01)]
    generate = backend.generate

    def refusing(*asked):
        if refusals:
            raise refusals.pop()
        return generate(*asked)

    backend.generate = refusing

    async def main():
        async with scene.running():
            batch = await scene.ended(scene.create(line("a"), line("b")))
        assert (batch.num_completed, batch.num_failed, refusals) == (2, 0, [])

    run(main())


def test_when_the_engine_fails_lines_stay_for_the_next_start(scene, backend, tokenizer, config, store):
    async def main():
        backend.error, backend.hold_after = Unavailable("the engine failed"), 3
        async with scene.running():
            id = scene.create(line("quick", body=TEXT | {"max_tokens": 1}), *[line(f"c{n}") for n in range(20)])
            await scene.until(lambda: store.read(id).num_completed == 1 and len(backend.seen) > 7)
        assert store.read(id).status == "in_progress"
        backend.error = None
        num_seen = len(backend.seen)
        again = Scene(backend, tokenizer, config, store)
        async with again.running():
            batch = await again.ended(id)
        assert (batch.num_completed, batch.num_failed) == (21, 0)
        assert len(backend.seen) - num_seen == 20

    run(main())


def test_stopped_it_aborts_and_the_next_start_goes_on(scene, backend, tokenizer, config, open_store, store):
    async def main():
        backend.hold_after = 3
        backend.hold.clear()
        async with scene.running():
            id = scene.create(line("quick", body=TEXT | {"max_tokens": 1}), *[line(f"c{n}") for n in range(20)])
            await scene.until(lambda: store.read(id).num_completed == 1 and backend.num_open == 7)
        assert backend.num_open == 0
        store.close()
        backend.hold.set()
        again = Scene(backend, tokenizer, config, open_store())
        async with again.running():
            batch = await again.ended(id)
        assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 21, 0)

    run(main())


def test_closed_it_asks_nothing(scene, backend):
    async def main():
        scene.is_open = False
        async with scene.running():
            id = scene.create(line("a"))
            await scene.until(lambda: scene.store.read(id).status == "in_progress")
            await asyncio.sleep(0.1)
            assert backend.seen == []
            assert scene.runner.counts().num_waiting == 1
            scene.is_open = True
            await scene.ended(id)

    run(main())


def test_answers_wait_for_a_disk_that_is_full(scene, backend, monkeypatch):
    monkeypatch.setattr("server.batches.answer_writer.RETRY_SECONDS", 0.01)
    failures = [sqlite3.OperationalError("database or disk is full"), OSError(28, "No space left on device")]
    keep = scene.store.keep

    def failing(answers):
        if failures:
            raise failures.pop()
        keep(answers)

    scene.runner._writer._keep = failing

    async def main():
        async with scene.running():
            batch = await scene.ended(scene.create(*[line(str(n)) for n in range(10)]))
        assert (batch.num_completed, failures) == (10, [])
        assert len(backend.seen) == 10  # none was asked twice

    run(main())


def test_a_life_that_breaks_begins_again(scene, monkeypatch):
    monkeypatch.setattr("server.batches.runner.LOOK_SECONDS", 0.05)
    failures = [OSError("one"), OSError("two")]
    finish = scene.store.finish

    def failing(id):
        if failures:
            raise failures.pop()
        return finish(id)

    monkeypatch.setattr(scene.store, "finish", failing)

    async def main():
        async with scene.running():
            assert (await scene.ended(scene.create(line("a")))).status == "completed"

    run(main())


def test_it_counts(scene):
    async def main():
        async with scene.running():
            await scene.ended(scene.create(line("a"), line("b"), line("c", body=TEXT | {"n": 0})))
        counts = scene.runner.counts()
        assert (counts.num_completed, counts.num_failed, counts.num_waiting) == (2, 1, 0)

    run(main())
