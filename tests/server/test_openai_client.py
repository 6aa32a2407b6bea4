"""The official `openai` client against a real server on a socket."""

import asyncio
import time
from collections.abc import Iterator

import openai
import pytest

from jaxinfer.request import FinishReason
from server.openai.app import create_app
from tests.server.fakes import ANSWER
from tests.server.serving import served

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def url(backend, tokenizer, config) -> Iterator[str]:
    with served(create_app(backend, tokenizer, config)) as url:
        yield url + "/v1"


@pytest.fixture
def api(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


def test_chat(api):
    answer = api.chat.completions.create(model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3)
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer._request_id.startswith("req_")


def test_chat_stream(api):
    stream = api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == len(ANSWER.encode())


def test_chat_stream_helper(api):
    with api.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_completion(api):
    answer = api.completions.create(model="tiny", prompt=["a", "b"], echo=True, logprobs=2, max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["aHel", "bHel"]
    assert answer.choices[0].logprobs.tokens == ["a", "H", "e", "l"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_completion_stream_with_extensions(api, backend):
    stream = api.completions.create(model="tiny", prompt="a", stream=True, extra_body={"top_k": 3, "ignore_eos": True})
    assert ANSWER.startswith("".join(chunk.choices[0].text for chunk in stream)[:10])
    [(_, _, params)] = backend.seen
    assert (params.top_k, params.ignore_eos) == (3, True)


def test_turn_and_usage(api, backend):
    answer = api.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        service_tier="flex",
        extra_body={"cache_salt": "s", "timeout": 60},
        extra_headers={"x-session-affinity": "talk"},
        timeout=5,  # the client's own, which it tells the server in a header
    )
    assert answer.service_tier == "flex"
    assert answer.usage.jaxinfer == {"queue_seconds": 0.25, "prefill_seconds": 0.5, "decode_seconds": 0.125}
    [context] = backend.contexts
    assert (context.priority, context.session) == (10, "anonymous/talk")
    assert context.deadline > time.monotonic() + 30


def test_turn_and_usage_of_a_stream(api, backend):
    raw = api.completions.with_raw_response.create(
        model="tiny",
        prompt="Tell",
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"priority": -2},
        extra_headers={"x-session-affinity": "talk"},
    )
    assert raw.headers["x-session-affinity"] == "talk"
    *_, last = raw.parse()
    assert last.usage.jaxinfer["prefill_seconds"] == 0.5
    assert backend.contexts[0].priority == -2


def test_a_timeout_is_not_asked_again(url, backend):
    backend.gives_up = FinishReason.TIMEOUT
    with openai.OpenAI(base_url=url, api_key="none", max_retries=2) as api:
        with pytest.raises(openai.APIStatusError) as timeout:
            api.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"timeout": 0.1})
        assert (timeout.value.status_code, timeout.value.code) == (408, "timeout")
        backend.hold_after = 3
        with pytest.raises(openai.APIError, match="timeout"):
            list(api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    assert len(backend.seen) == 2


def test_models(api):
    assert [model.id for model in api.models.list()] == ["tiny", "org/tiny", "encoder"]
    assert api.models.retrieve("org/tiny").id == "org/tiny"


def test_errors_are_the_clients_own(api, backend):
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("temperature", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        api.chat.completions.create(model="gpt-x", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    backend.is_full = True
    with pytest.raises(openai.RateLimitError) as full:
        api.completions.create(model="tiny", prompt="a")
    assert full.value.response.headers["retry-after"] == "7"


def test_a_body_over_the_limit_is_told_even_while_it_is_sent(api):
    with pytest.raises(openai.APIStatusError) as large:
        api.completions.create(model="tiny", prompt="x" * 5_000_000)
    assert large.value.status_code == 413
    assert api.completions.create(model="tiny", prompt="x").choices[0].text


def test_an_error_in_a_stream_is_raised(api, backend):
    backend.error, backend.hold_after = ZeroDivisionError(), 4
    with pytest.raises(openai.APIError, match="internal error"):
        for _ in api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
            pass


def test_sixty_four_streams_at_once_and_some_that_leave(url, backend):
    async def ask(api, number):
        stream = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if number % 4 == 0 and len(text) > 3:
                await stream.close()
                return "left"
        return text

    async def run():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
            return await asyncio.gather(*[ask(api, number) for number in range(64)])

    texts = asyncio.run(run())
    assert texts.count("left") == 16
    assert texts.count(ANSWER) == 48
