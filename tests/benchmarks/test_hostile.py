"""The cheap version of `benchmarks.hostile`: a real front on a socket, over a backend that writes a token every 10 ms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from benchmarks import hostile
from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from server.config import ServerConfig
from server.openai.app import create_app
from tests.server.fakes import FakeBackend, byte_tokenizer, device_usage
from tests.server.serving import served

PERIOD = 0.01  # seconds
NAMES = ["a text of 3.9 MB", "a key of 3.9 MB", "300,000 unknown keys", "100,000 messages", "290,000 token ids, all wrong"]


class SteadyBackend(FakeBackend):
    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> AsyncGenerator[OutputDelta]:
        for _ in range(params.max_tokens or 1):
            await asyncio.sleep(PERIOD)
            yield OutputDelta(request_id, 0, "a", (97,))
        yield OutputDelta(request_id, 0, finish_reason=FinishReason.LENGTH, device_usage=device_usage(1))


def test_a_stream_goes_on_beside_each_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each of them stopped it for 0.6 to 7 s."""
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(hostile, "WARM_UP", 0.1)
    monkeypatch.setattr(hostile, "STREAM_TOKENS", 16)
    with served(create_app(SteadyBackend(tokenizer), tokenizer, ServerConfig(served_model_name=("tiny",)))) as url:
        quiet, noticed = asyncio.run(hostile.run(url, "tiny", NAMES, 0.2, lambda: 0.0))
    assert [one.statuses for one in quiet] == [{}] * len(NAMES)
    assert [one.attack for one in noticed] == NAMES
    for one in noticed:
        assert set(one.statuses) == {"400"}, one
        assert max(one.longest_gap, one.longest_health) < 400, one  # also on a busy machine
