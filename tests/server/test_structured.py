"""Answers over HTTP that are held to something, by a real engine over the tiny model, read by the official client."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from fastapi.testclient import TestClient

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from server.config import ServerConfig
from server.local_backend import LocalBackend
from server.openai.app import create_app
from tests.conftest import TINY
from tests.server.fakes import FakeBackend
from tests.server.serving import served

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
# Short: a prompt of the tiny model has 512 bytes at most, with an example of a call.
CITY = {"properties": {"at": {"enum": ["Rome", "Oslo"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["at", "n"]}
TIME = {"properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False}


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo"]
    degrees: int = pydantic.Field(ge=0, le=40)


def tool(name: str, schema: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@pytest.fixture(scope="module")
def api(tiny_model_path: Any) -> Iterator[openai.OpenAI]:
    engine = Engine(EngineConfig.of(model=str(tiny_model_path), **TINY | {"max_batch_size": 8, "decode_buckets": (8,)}))
    app = create_app(LocalBackend(engine), engine.tokenizer, ServerConfig(served_model_name=("tiny",)))
    with served(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client
    assert engine.stats.num_compilations_after_ready == 0


def test_the_official_client_parses_its_own_models(api: openai.OpenAI) -> None:
    for seed in range(3):
        answer = api.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Weather, seed=seed, temperature=1.0)
        assert isinstance(answer.choices[0].message.parsed, Weather)
        assert answer.choices[0].finish_reason == "stop"


def test_each_kind_in_chat_completions_and_streams(api: openai.OpenAI) -> None:
    one: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "max_tokens": 60}
    for extra, pattern in (
        ({"structured_outputs": {"regex": "[a-f]{4}!"}}, "[a-f]{4}!"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "<" /[0-9]{2}/ ">"'}}, "<[0-9]{2}>"),
        ({"response_format": {"type": "json_object"}}, r"\{(?s:.*)"),
    ):
        text = api.completions.create(prompt="x", extra_body=extra, **one).choices[0].text
        assert re.fullmatch(pattern, text), text
        chunks = api.chat.completions.create(messages=MESSAGES, extra_body=extra, stream=True, **one)
        assert re.fullmatch(pattern, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}], ids=["required", "named"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_calls_that_have_to_come_do(api: openai.OpenAI, choice: Any, is_streamed: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 200, "parallel_tool_calls": False}
    asked |= {"tools": [tool("city", CITY), tool("time", TIME)], "tool_choice": choice}
    for seed in range(3):
        if is_streamed:
            deltas = [chunk.choices[0] for chunk in api.chat.completions.create(stream=True, seed=seed, **asked) if chunk.choices]
            parts = [part for one in deltas for part in one.delta.tool_calls or ()]
            name, arguments = parts[0].function.name, "".join(part.function.arguments or "" for part in parts)
            reason = deltas[-1].finish_reason
        else:
            [one] = api.chat.completions.create(seed=seed, **asked).choices
            [call] = one.message.tool_calls or ()
            name, arguments, reason = call.function.name, call.function.arguments, one.finish_reason
        assert reason == "tool_calls"
        assert name == "time" if choice != "required" else name in ("city", "time")
        found = json.loads(arguments)
        if name == "time":
            assert found in ({"zone": "UTC"}, {"zone": "CET"})
        else:
            assert found["at"] in ("Rome", "Oslo") and 1 <= found["n"] <= 9


def test_several_choices_and_strict_tools(api: openai.OpenAI) -> None:
    """With `strict` a call may come or not; if one does, it keeps to its schema."""
    answer = api.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[tool("time", TIME, strict=True)], n=4, temperature=1.0, max_tokens=30
    )
    for choice in answer.choices:
        for call in choice.message.tool_calls or ():
            assert choice.finish_reason == "length" or json.loads(call.function.arguments)["zone"] in ("UTC", "CET")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": 5}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}}, "structured_outputs", "Invalid type"),
        ({"structured_outputs": {}}, "structured_outputs", "nothing: give one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give one of"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "held to one of them"),
        ({"guided_choice": []}, "guided_choice", "nothing: give one of"),
        ({"guided_choice": "yes"}, "guided_choice", "must be a list"),
        (
            {"tools": [tool("time", TIME)], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "don't go together",
        ),
        ({"tools": [tool("time", {"type": "thing"})], "tool_choice": "required"}, "structured_outputs", "Invalid type"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_can_not_be_held_is_refused(api: openai.OpenAI, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        api.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=fields)
    assert error.value.param == param
    assert words in str(error.value)


def test_grammars_are_compiled_beside_the_event_loop(client: TestClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first one takes the tokenizer's tables too: half a second in which no stream would go on."""
    names: list[str] = []
    validate = backend.validate
    monkeypatch.setattr(backend, "validate", lambda *given: names.append(threading.current_thread().name) or validate(*given))
    for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})):
        names.clear()
        for more in ({}, {"guided_choice": ["a"]}):
            client.post(f"/v1/{path}", json={"model": "tiny", **body, **more})
        assert [name.startswith("long-texts") for name in names] == [False, True]
