"""ModelBackend: how many may wait for a model that sleeps, what those who wait too long are told, and who leaves."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.tokenizer import Tokenizer
from server.backend import InFlight, Overloaded
from server.models.policy import Limits
from server.models.several_models import SeveralModels
from server.models.turns import TurnSettings
from tests.server.fakes import ANSWER, FakeBackend


class Sleeper(FakeBackend):
    """Of 8 bytes while it is awake."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._stats.is_asleep = True
        self._stats.memory = {"shared weights": 5, "shared KV pages": 3, "shared temporaries": 100}

    def weight_control(self) -> Sleeper:
        return self

    async def sleep(self, level: int, in_flight: InFlight) -> None:
        assert self.num_open == 0
        self._stats.is_asleep = True

    async def wake(self) -> None:
        self._stats.is_asleep = False


async def text(models: SeveralModels, index: int, request_id: str, params: SamplingParams, context: RequestContext) -> str | FinishReason:
    """The first sequence's, or why there is none."""
    found = ""
    async with aclosing(models.each[index].generate(request_id, Prompt.of_tokens([1, 2]), params, context)) as deltas:
        async for delta in deltas:
            found += delta.text if delta.index == 0 else ""
            if delta.finish_reason is FinishReason.TIMEOUT:
                return delta.finish_reason
    return found


def test_the_queue_for_a_model_that_sleeps(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        first, second = Sleeper(tokenizer), Sleeper(tokenizer)
        models = SeveralModels({"first": first, "second": second}, TurnSettings(Limits(room=10, turn=0.05)), max_waiting=3)
        await models.start()
        assert {name: report.status for name, report in models.models().items()} == {"first": "awake", "second": "asleep"}

        def ask(index: int, request_id: str, context: RequestContext = DEFAULT_CONTEXT, n: int = 1) -> asyncio.Task[str | FinishReason]:
            return asyncio.create_task(text(models, index, request_id, SamplingParams(n=n), context))

        first.hold.clear()
        holds = ask(0, "holds the first")
        await asyncio.sleep(0)
        waiting = [ask(1, "waits"), ask(1, "leaves"), ask(1, "late", RequestContext(deadline=time.monotonic() + 0.01), n=2)]
        await asyncio.sleep(0.001)
        assert models.stats().num_waiting == 3
        with pytest.raises(Overloaded):
            await ask(1, "one too many")
        waiting[1].cancel()
        assert await waiting[2] is FinishReason.TIMEOUT
        assert models.stats().num_waiting == 1
        await asyncio.sleep(0.06)  # the first's turn is over: it takes no more
        behind = ask(0, "waits for the next turn")
        await asyncio.sleep(0.01)
        assert [request_id for request_id, *_ in first.seen] == ["holds the first"]
        assert not second.seen
        first.hold.set()
        assert await asyncio.gather(holds, waiting[0], behind) == [ANSWER] * 3
        assert [request_id for request_id, *_ in second.seen] == ["waits"]
        reports = models.models()
        assert [(report.num_wakes, report.num_sleeps, report.num_waiting) for report in reports.values()] == [(1, 1, 0), (1, 1, 0)]
        await models.stop()
        assert not models.is_ready()

    asyncio.run(run())


def test_a_model_whose_engine_failed_fails_all_by_name(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        backends = {name: Sleeper(tokenizer) for name in ("first", "second")}
        models = SeveralModels(backends, TurnSettings(Limits(room=16, turn=1.0)), max_waiting=3)
        await models.start()
        assert models.is_ready()
        backends["second"].failed = "the engine failed"
        assert models.failure() == models.models()["second"].status == "second: the engine failed"
        assert not models.is_ready()
        assert await text(models, 0, "still served", SamplingParams(), DEFAULT_CONTEXT) == ANSWER

    asyncio.run(run())
