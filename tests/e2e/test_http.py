"""The official openai client, a real server and a real engine: what comes over HTTP is what the engine gives offline."""

from __future__ import annotations

import asyncio
import time
import urllib.request

import numpy as np
import openai
import pytest

from jaxinfer.request import SamplingParams
from tests.engine.page_audit import assert_all_free
from tests.engine.workload import workload

PROMPTS, _ = workload()
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say the rain in Spain."}]


def offline(llm, prompts, **params) -> list[str]:
    outputs = llm.generate(prompts, SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | params))
    return [sequence.text for output in outputs for sequence in output.outputs]


def wait_until_idle(engine) -> None:
    deadline = time.monotonic() + 20
    while engine.has_work or engine.stats.num_running or engine.stats.decode_pages_used or engine.stats.prefill_pages_used:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_completions_of_token_lists(api, llm):
    answer = api.completions.create(prompt=PROMPTS, max_tokens=30, **GREEDY)
    assert [choice.text for choice in answer.choices] == offline(llm, PROMPTS, max_tokens=30)
    assert answer.usage.completion_tokens == 30 * len(PROMPTS)
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))


def test_seeded_sampling_with_every_option(api, llm):
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 12, "presence_penalty": 0.5, "frequency_penalty": 0.3, "n": 3, "max_tokens": 25}
    more = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 3}
    answer = api.completions.create(model="tiny", prompt="the rest", logit_bias={"65": 3}, extra_body=more, **options)
    assert [choice.text for choice in answer.choices] == offline(llm, ["the rest"], logit_bias={65: 3.0}, **options | more)


def test_chat_and_its_stream(api, llm):
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    answer = api.chat.completions.create(messages=MESSAGES, max_tokens=40, **GREEDY)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    stream = api.chat.completions.create(messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}, **GREEDY)
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.outputs[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 40


def test_log_probabilities(api, llm):
    prompt = PROMPTS[6]
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=3, ignore_eos=True))
    answer = api.completions.create(prompt=prompt, max_tokens=8, logprobs=3, echo=True, **GREEDY)
    reported = answer.choices[0].logprobs.token_logprobs
    assert reported[0] is None
    expected = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    np.testing.assert_allclose(reported[1:], [one.logprob for one in expected], atol=1e-4)
    np.testing.assert_allclose(reported[1:], llm.logprobs(prompt + output.outputs[0].token_ids)[1:], atol=1e-4)

    chat = api.chat.completions.create(messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, **GREEDY)
    content = chat.choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(one.top_logprobs) == 2 and one.logprob == pytest.approx(one.top_logprobs[0].logprob, abs=1e-5) for one in content)


def test_stop_strings_and_tokens(api, llm):
    [whole] = offline(llm, ["and then"], max_tokens=60)
    middle = next(whole[i : i + 3] for i in range(12, len(whole)) if "\ufffd" not in whole[i : i + 3])
    answer = api.completions.create(prompt="and then", max_tokens=60, stop=[middle, "never, ever"], **GREEDY)
    assert answer.choices[0].text == whole[: whole.index(middle)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = api.completions.create(prompt="and then", max_tokens=60, stop=middle, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[: whole.index(middle)]

    [output] = llm.generate(["and then"], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    token = output.outputs[0].token_ids[9]
    first = output.outputs[0].token_ids.index(token)
    stopped = api.completions.create(
        model="tiny", prompt="and then", max_tokens=60, temperature=0, extra_body={"stop_token_ids": [token], "ignore_eos": True}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == first + 1


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"prompt": [1] * 513}, "prompt", "513"),
        ({"prompt": [512]}, "prompt", "0 to 511"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "-1"),
        ({"prompt": "x", "temperature": -1}, "temperature", "-1"),
        ({"prompt": "x", "n": 1000}, "n", "1000"),
        ({"prompt": "x", "logit_bias": {"512": 1}}, "logit_bias", "512"),
        ({"prompt": ""}, "prompt", "prompt"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_errors_name_the_field_and_leave_the_engine_serving(api, tiny_server, options, param, words):
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        api.completions.create(model="tiny", **options)
    assert caught.value.status_code in (400, 422)
    assert caught.value.param == param
    assert api.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens == 2
    wait_until_idle(tiny_server.engine)


def test_an_unknown_model(api):
    with pytest.raises(openai.NotFoundError, match="served here is tiny"):
        api.completions.create(model="huge", prompt="x")


async def _streams(url: str, leaves: float) -> dict[int, str | None]:
    """64 streams at once, a share of which is left in the middle."""
    random = np.random.default_rng(6)
    is_leaving = random.random(64) < leaves

    async def one(api: openai.AsyncOpenAI, number: int) -> str | None:
        stream = await api.completions.create(prompt=PROMPTS[number % 32], max_tokens=48, stream=True, **GREEDY)
        parts = []
        async for chunk in stream:
            parts.append(chunk.choices[0].text)
            if is_leaving[number] and len(parts) > number % 9:
                await stream.close()
                return None
        return "".join(parts)

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        return dict(enumerate(await asyncio.gather(*[one(api, number) for number in range(64)])))


def test_sixty_four_streams_at_once(tiny_server, llm):
    texts = asyncio.run(_streams(tiny_server.url, leaves=0.0))
    expected = offline(llm, PROMPTS, max_tokens=48)
    assert texts == {number: expected[number % 32] for number in range(64)}
    wait_until_idle(tiny_server.engine)
    assert_all_free(tiny_server.engine)


def test_streams_left_in_the_middle_leave_no_page_behind(tiny_server, llm):
    aborted = tiny_server.engine.stats.finished.get("abort", 0)
    expected = offline(llm, PROMPTS, max_tokens=48)
    for _ in range(2):
        texts = asyncio.run(_streams(tiny_server.url, leaves=0.6))
        assert all(text in (None, expected[number % 32]) for number, text in texts.items())
    wait_until_idle(tiny_server.engine)
    assert_all_free(tiny_server.engine)
    assert tiny_server.engine.stats.finished["abort"] - aborted > 20


def test_nothing_compiled_while_serving(api, tiny_server, llm):
    engine = tiny_server.engine
    before = engine.stats.num_compilations_after_ready
    api.chat.completions.create(messages=MESSAGES, max_tokens=5, n=2, logprobs=True, top_logprobs=20, model="tiny")
    wait_until_idle(engine)
    with urllib.request.urlopen(tiny_server.url + "/metrics") as page:
        metrics = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if not line.startswith("#"))
    assert float(metrics["jaxinfer_compilations_after_ready_total"]) == before == engine.stats.num_compilations_after_ready
    assert float(metrics['jaxinfer_kv_pages_used{mesh="decode"}']) == 0
    assert float(metrics['jaxinfer_kv_pages{mesh="decode"}']) == engine.stats.decode_pages == 63
