"""AsyncLLM: tasks of any event loop get what LLM gives, and what they leave is aborted."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from jaxinfer import AsyncLLM, EngineClosedError, RequestError, SamplingParams
from jaxinfer.config import ConfigError
from tests.engine.page_audit import assert_all_free

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=500, ignore_eos=True)
PROMPTS = [[7 + i, 3, 11 * i + 2] for i in range(12)]
MESSAGES = [{"role": "user", "content": "hi"}]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_tasks_and_threads_get_what_llm_gives(llm):
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    shared = AsyncLLM(llm)

    async def streamed(prompt):
        return [token async for delta in shared.stream(prompt, GREEDY) for token in delta.token_ids]

    async def run():
        together = asyncio.gather(*[streamed(prompt) for prompt in PROMPTS])
        in_thread = asyncio.to_thread(llm.generate, PROMPTS, GREEDY)
        whole, chat, logits = shared.generate(iter(PROMPTS), GREEDY), shared.chat(MESSAGES, GREEDY), shared.logits(PROMPTS[0])
        async with asyncio.timeout(60):
            return await asyncio.gather(together, in_thread, whole, chat, logits, shared.generate([]))

    for _ in range(2):  # an event loop each
        together, in_thread, whole, chat, logits, none = asyncio.run(run())
        assert together == tokens(in_thread) == tokens(whole) == expected
        assert chat.outputs[0].text == llm.chat(MESSAGES, GREEDY).outputs[0].text
        assert np.array_equal(logits, llm.logits(PROMPTS[0]))
        assert none == []
    assert_all_free(llm.engine)


def test_many_streams_wake_the_event_loop_once_a_step(llm):
    shared = AsyncLLM(llm)

    async def run():
        event_loop, num_wakes, num_deltas = asyncio.get_running_loop(), 0, 0
        call_soon_threadsafe = event_loop.call_soon_threadsafe

        def counted(callback, *arguments, **keywords):
            nonlocal num_wakes
            num_wakes += getattr(callback, "__name__", "") == "_sort"
            return call_soon_threadsafe(callback, *arguments, **keywords)

        event_loop.call_soon_threadsafe = counted

        async def read(prompt):
            nonlocal num_deltas
            async for _ in shared.stream(prompt, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)):
                num_deltas += 1

        steps = llm.engine.stats.num_decode_steps
        await asyncio.gather(*[read(prompt) for prompt in PROMPTS])
        assert num_deltas == 100 * len(PROMPTS)
        assert num_wakes <= llm.engine.stats.num_decode_steps - steps + len(PROMPTS)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["break", "cancel a stream", "cancel generate", "the event loop ends"])
def test_what_is_left_is_aborted(llm, how):
    aborted = llm.engine.stats.finished.get("abort", 0)
    shared = AsyncLLM(llm)

    async def run():
        started = asyncio.Event()

        async def read():
            async with aclosing(shared.stream([1], ENDLESS)) as deltas:
                async for _ in deltas:
                    started.set()
                    if how == "break":
                        break

        if how == "cancel generate":
            task = asyncio.create_task(shared.generate([[1], [2]], ENDLESS))
            await asyncio.sleep(0.05)
        else:
            task = asyncio.create_task(read())
            await started.wait()
        if how.startswith("cancel"):
            task.cancel()
        if how != "the event loop ends":
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    llm.generate([3], GREEDY)
    assert llm.engine.stats.finished.get("abort", 0) - aborted == (2 if how == "cancel generate" else 1)
    assert_all_free(llm.engine)


def test_errors_are_llms(llm):
    shared = AsyncLLM(llm)

    async def run():
        with pytest.raises(RequestError, match="prompts is None"):
            await shared.generate(None)
        with pytest.raises(RequestError, match="the prompt is empty"):
            async for _ in shared.stream(""):
                pass
        with pytest.raises(ConfigError, match="no embedding model"):
            await shared.embed("x")
        async with shared:
            pass
        assert (await shared.generate([1], GREEDY))[0].is_finished, "a given LLM stays open"

    asyncio.run(run())


def test_an_llm_of_its_own_is_closed_in_the_end(tiny_model_path):
    async def run():
        small = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (32,), "prefill_chunk_size": 32, "kv_memory": "512KiB"}
        async with AsyncLLM(str(tiny_model_path), **small) as llm:
            task = asyncio.create_task(llm.generate([1], ENDLESS))
            await asyncio.sleep(0.05)
        for late in (task, llm.generate([1]), llm.logits([1])):
            with pytest.raises(EngineClosedError, match="the engine is closed"):
                await late

    asyncio.run(run())
