"""What a request may hold: what would hold others up is refused before any work is done on it, in few words."""

import asyncio
import itertools
import json
import threading
import time

import pytest
from fastapi.testclient import TestClient

from jaxinfer.request import MAX_STOP, MAX_STOP_CHARACTERS, RequestError, SamplingParams
from server.config import ServerConfig
from server.openai.app import create_app
from server.openai.errors import ApiError
from server.openai.json_text import MAX_BACKSLASHES, MAX_DEPTH, MAX_KEY, MAX_KEYS, MAX_OBJECTS, MAX_STRINGS, MAX_VALUES, read_json
from server.openai.protocol import MAX_MESSAGES, MAX_TEMPLATE_KWARGS, MAX_TOOLS
from server.openai.text_work import LONG_TEXT, VERY_LONG_TEXT, work_on
from tests.server.fakes import FakeBackend, byte_tokenizer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
HALF_MEGABYTE = 1 << 19


def calling(arguments):
    return {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ("[" + "1," * MAX_VALUES + "1]", "values"),
        ("[" + '"a",' * MAX_STRINGS + '"a"]', "strings"),
        ('["' + '","' * 2 * MAX_VALUES + '"]', "strings"),
        ('["' + "\\n" * (MAX_BACKSLASHES + 1) + '"]', "backslashes"),
        ("[" + "{}," * MAX_OBJECTS + "1]", "objects"),
        ("[" + "[]," * MAX_OBJECTS + "1]", "objects"),
        ("{" + '"a":1,' * MAX_KEYS + '"a":1}', "keys"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "in each other"),
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "in each other"),
        ('["\\\\",' + "[" * 70 + '"', "in each other"),  # an escaped backslash, and no escaped quote
        ("[" * 2_000_000, "objects"),
        ('{"' + "k" * (MAX_KEY + 1) + '":1}', "key of 257 characters"),
        ('{"a":{"' + "k" * 3_000_000 + '":1}}', "key of 3000000 characters"),
    ],
    ids=lambda value: value[:12],
)
def test_json_that_takes_long_to_read_is_refused_in_few_words(raw, says):
    with pytest.raises(ApiError, match=says) as error:
        read_json(raw.encode(), "the body")
    assert len(error.value.message) < 120


@pytest.mark.parametrize(
    "value",
    [
        [1] * MAX_VALUES,
        [[]] * (MAX_OBJECTS - 1),
        {str(n): "," for n in range(MAX_KEYS)},
        ["[{" * 400_000 + ",:" * 400_000],
        ['"' * 99_999, "\\" * 49_999, '\\"' * 20_000, "é" * 99_999],
        [[["a"] * 60_000], "\\", '[[[["'],
        {"k" * MAX_KEY: 1},
        1.5,
    ],
    ids=lambda value: repr(value)[:12],
)
def test_other_json_is_read_as_it_is(value):
    for ensure_ascii in (True, False):
        assert read_json(json.dumps(value, ensure_ascii=ensure_ascii).encode(), "the body") == value


def test_json_is_utf_8():
    assert read_json(b"\xef\xbb\xbf[1]", "the body") == [1]
    for encoding in ("utf-16", "utf-32"):  # whose structure would be read wrongly
        with pytest.raises(ApiError, match="not valid JSON"):
            read_json(json.dumps([1]).encode(encoding), "the body")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stop": ["a"] * (MAX_STOP + 1)}, "stop"),
        ({"stop": ["a"] * 50_000}, "stop"),
        ({"stop": "a" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
        ({"messages": CHAT["messages"] * (MAX_MESSAGES + 1)}, "messages"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
        ({"chat_template_kwargs": {str(n): 1 for n in range(MAX_TEMPLATE_KWARGS + 1)}}, "chat_template_kwargs"),
        ({f"unknown {n}": 1 for n in range(300)}, None),
        ({f"unknown {n}": 1 for n in range(MAX_KEYS + 1)}, None),
        ({"k" * HALF_MEGABYTE: 1}, None),
        ({"messages": [CHAT["messages"][0] | {"k" * 200: "v" * HALF_MEGABYTE, "role": "r" * 1000, "content": 1}]}, None),
        ({"messages": [{"role": "user", "content": "x " * HALF_MEGABYTE}]}, "messages"),
        ({"messages": [*CHAT["messages"], calling('{"a": [' + "1," * MAX_VALUES + "1]}")]}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [*CHAT["messages"], calling('{"a":' * 900 + "1" + "}" * 900)]}, "messages[1].tool_calls[0].function.arguments"),
        ({"service_tier": "t" * HALF_MEGABYTE}, "service_tier"),
        ({"model": "m" * HALF_MEGABYTE}, "model"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_request_beyond_a_bound_is_refused_and_little_of_it_sent_back(large_client, change, param):
    response = large_client.post("/v1/chat/completions", content=json.dumps(CHAT | change), headers={"content-type": "application/json"})
    assert response.status_code in (400, 404)
    assert len(response.content) < 700
    assert len(response.headers.get("x-jaxinfer-ignored-parameters", "")) < 100
    error = response.json()["error"]
    assert param is None or error["param"] == param
    assert len(error["param"] or "") <= 80


@pytest.fixture
def large_client(backend, tokenizer):
    with TestClient(create_app(backend, tokenizer, ServerConfig(served_model_name=("tiny",)))) as client:
        yield client


def test_stop_strings_are_bounded_offline_too():
    SamplingParams(stop=["a" * MAX_STOP_CHARACTERS] * MAX_STOP)
    with pytest.raises(RequestError, match="at most 16"):
        SamplingParams(stop=["a"] * (MAX_STOP + 1))
    with pytest.raises(RequestError, match="of 1001 characters"):
        SamplingParams(stop="a" * (MAX_STOP_CHARACTERS + 1))


def test_long_work_is_done_beside_the_event_loop_and_the_very_long_waits_for_itself_only():
    async def main():
        free = threading.Event()
        names = itertools.count()
        very_long = [asyncio.create_task(work_on(VERY_LONG_TEXT, lambda: (free.wait(10), next(names)))) for _ in range(2)]
        started = time.monotonic()
        assert await work_on(LONG_TEXT, threading.current_thread) is not threading.main_thread()
        assert await work_on(LONG_TEXT - 1, threading.current_thread) is threading.main_thread()
        very_long[1].cancel()  # before its turn: never done
        await asyncio.wait(very_long[1:])
        free.set()
        await very_long[0]
        assert await work_on(VERY_LONG_TEXT, lambda: next(names)) == 1
        assert time.monotonic() - started < 5

    asyncio.run(main())


def test_a_long_tool_is_tokenized_beside_the_event_loop(config, monkeypatch):
    threads = []
    tokenizer = byte_tokenizer("{{ tools[0].function.description }}")
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda *a, **k: threads.append(threading.current_thread().name) or encode(*a, **k))
    tool = TOOL | {"function": {"name": "f", "description": "x" * LONG_TEXT}}
    with TestClient(create_app(FakeBackend(tokenizer), tokenizer, config)) as client:
        assert client.post("/v1/chat/completions", json=CHAT | {"tools": [tool]}).json()["error"]["code"] == "context_length_exceeded"
    assert [name.partition("_")[0] for name in threads] == ["long-texts"]
