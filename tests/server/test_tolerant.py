"""What clients send beyond what is implemented: ignored and named where no answer could differ, else refused by name."""

import json
import logging

import openai
import pytest
from fastapi.testclient import TestClient

from server.openai import parameter_policy
from server.openai.app import create_app
from tests.server.fakes import ANSWER, FakeBackend, byte_tokenizer
from tests.server.serving import served
from tests.server.sse import events_of

HEADER = "x-jaxinfer-ignored-parameters"
USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "tiny", "messages": [USER]}
CALL = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "12"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}{{ tools | tojson if tools else '' }}"
)

# What each client sends back of an answer, as it sends it: what the prompt is to be like, and what is named as ignored.
SENT_BACK = {
    "litellm": (
        {"role": "assistant", "content": "A", "tool_calls": None, "function_call": None, "provider_specific_fields": {"refusal": None}},
        ["messages[].provider_specific_fields"],
    ),
    "litellm, thinking": (
        {"role": "assistant", "content": "A", "reasoning_content": "T", "thinking_blocks": [], "images": []},
        ["messages[].thinking_blocks", "messages[].images"],
    ),
    "openai, parsed": (
        {"content": "A", "refusal": None, "role": "assistant", "annotations": None, "audio": None, "parsed": {"a": 1}, "tool_calls": []},
        ["messages[].parsed"],
    ),
    "openai, annotations": (
        {"role": "assistant", "content": "A", "annotations": [{"type": "url_citation"}], "refusal": None},
        ["messages[].annotations"],
    ),
    "langchain": ({"role": "assistant", "content": "A", "name": None, "id": "run-1", "refusal": None}, ["messages[].id"]),
    "AI SDK": (
        {"role": "assistant", "content": [{"type": "text", "text": "A", "providerOptions": {}}]},
        ["messages[].content[].providerOptions"],
    ),
    "opencode, aider: caching": (
        {"role": "assistant", "content": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}], "cache_control": {}},
        ["messages[].content[].cache_control", "messages[].cache_control"],
    ),
    "OpenRouter": ({"role": "assistant", "content": "A", "reasoning": "T", "reasoning_details": [{}]}, ["messages[].reasoning_details"]),
    "a refusal": ({"role": "assistant", "content": [{"type": "refusal", "refusal": "A"}]}, []),
    "a refusal of its own": ({"role": "assistant", "content": None, "refusal": "A"}, ["messages[].refusal"]),
}


def prompt_of(backend) -> str:
    return backend.tokenizer.decode(backend.seen[-1][1], skip_special_tokens=False)


@pytest.fixture
def backend():
    return FakeBackend(byte_tokenizer(TEMPLATE))


@pytest.fixture
def client(backend, config):
    with TestClient(create_app(backend, backend.tokenizer, config)) as client:
        yield client


@pytest.mark.parametrize("name", SENT_BACK)
def test_an_answer_may_be_sent_back_as_clients_do(client, backend, name):
    message, ignored = SENT_BACK[name]
    response = client.post("/v1/chat/completions", json=CHAT | {"messages": [USER, message, USER]})
    assert response.status_code == 200, response.text
    assert set(response.headers.get(HEADER, "").split(", ")) == set(ignored or [""])
    thoughts = "T" if {"reasoning", "reasoning_content"} & set(message) else ""
    said = [("user", "Hi"), ("assistant", f"{thoughts}A"), ("user", "Hi")]
    assert prompt_of(backend) == "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)


def test_calls_may_be_sent_back_as_they_were_streamed(client, backend):
    call = CALL | {"index": 0, "provider_specific_fields": {}, "function": CALL["function"] | {"parsed_arguments": {}}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call | {"type": None}]}, RESULT | {"artifact": 1, "name": None}]
    response = client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    names = ("tool_calls[].index", "tool_calls[].provider_specific_fields", "tool_calls[].function.parsed_arguments", "artifact")
    assert response.headers[HEADER] == ", ".join(f"messages[].{name}" for name in names)
    assert json.dumps(CALL | {"function": {"name": "f", "arguments": {}}}) in prompt_of(backend)


# What clients send beside the messages, without effect on any answer.
IGNORED = {
    "verbosity": "low",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"a": 1},
    "moderation": {"model": "auto"},
    "safety_identifier": "s",
    "store": True,
    "metadata": {"a": 1},
    "user": "u",
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "client_metadata": {},
    "<odd>\r\nname: x": 1,
}
ALL_IGNORED = {*IGNORED, "?odd???name??x"} - {"<odd>\r\nname: x"}


@pytest.mark.parametrize("stream", [False, True])
def test_what_can_not_change_the_answer_is_ignored_and_named(client, backend, stream):
    response = client.post("/v1/chat/completions", json=CHAT | IGNORED | {"stream": stream})
    assert response.status_code == 200, response.text
    assert set(response.headers[HEADER].split(", ")) == ALL_IGNORED
    plain = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert HEADER not in plain.headers
    assert backend.seen[0][1:] == backend.seen[1][1:]
    if not stream:
        assert plain.json()["choices"] == response.json()["choices"]
    else:
        assert len(events_of(plain)) == len(events_of(response))


def test_tools_and_other_endpoints_are_read_so_too(client):
    function = {"name": "f", "strict": False, "parameters": None, "description": None, "example": 1}
    tools = [{"type": "function", "function": function, "cache_control": {}}]
    response = client.post("/v1/chat/completions", json=CHAT | {"tools": tools})
    assert set(response.headers[HEADER].split(", ")) == {"tools[].cache_control", "tools[].function.example"}
    response = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "user": "u", "prompt_cache_key": "k", "zzz": {}})
    assert set(response.headers[HEADER].split(", ")) == {"user", "prompt_cache_key", "zzz"}
    response = client.post("/v1/embeddings", json={"model": "encoder", "input": "a", "user": "u", "extra": 1})
    assert response.headers[HEADER] == "user, extra"
    assert client.post("/v1/chat/completions", json=CHAT | {"stream_options": {}, "top_logprobs": 0}).headers[HEADER] == "stream_options"
    options = {"stream": True, "stream_options": {"include_usage": True, "include_cost": True}}
    assert client.post("/v1/chat/completions", json=CHAT | options).headers[HEADER] == "stream_options.include_cost"


NULLS = (
    "response_format",
    "tools",
    "tool_choice",
    "functions",
    "audio",
    "modalities",
    "logit_bias",
    "seed",
    "zzz",
    "top_logprobs",
    "guided_json",
)


def test_nulls_are_as_if_they_were_left_out(client):
    body = CHAT | dict.fromkeys(NULLS) | {"messages": [USER | dict.fromkeys(("name", "tool_calls", "audio", "function_call", "zzz"))]}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200 and HEADER not in response.headers


@pytest.mark.parametrize(
    "wish",
    [
        {"modalities": ["text", "audio"]},
        {"logits_processors": ["x"]},
        {"max_new_tokens": 7},
        {"stop_sequences": ["x"]},
        {"web_search_options": {}},
        {"thinking": {"type": "enabled"}},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_what_would_change_the_answer_is_refused_as_not_implemented(client, backend, wish):
    response = client.post("/v1/chat/completions", json=CHAT | wish)
    [name] = wish
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert f"{name} is not implemented" in error["message"]
    assert backend.seen == []


def test_a_role_of_ones_own_reaches_the_template(client, backend):
    messages = [{"role": "critic", "content": "b", "note": 1}, USER]
    assert client.post("/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200
    assert prompt_of(backend).startswith("<|im_start|>critic\nb<|im_end|>")


def test_the_reasoning_effort_reaches_a_template_that_reads_it(config):
    backend = FakeBackend(byte_tokenizer("{{ reasoning_effort }}"))
    with TestClient(create_app(backend, backend.tokenizer, config)) as client:
        response = client.post("/v1/chat/completions", json=CHAT | {"reasoning_effort": "low"})
    assert response.status_code == 200 and HEADER not in response.headers
    assert prompt_of(backend) == "low"


def test_each_name_is_logged_once_and_what_clients_invent_is_bounded(client, caplog, monkeypatch):
    monkeypatch.setattr(parameter_policy.IGNORED, "_logged", set())
    with caplog.at_level(logging.WARNING, "server.openai.parameter_policy"):
        for _ in range(3):
            client.post("/v1/chat/completions", json=CHAT | {"verbosity": "low"})
        assert [record.getMessage().split()[4] for record in caplog.records] == ["verbosity,"]
        for n in range(40):
            names = {f"invented{n}_{i}" + "x" * 100: 1 for i in range(20)}
            response = client.post("/v1/chat/completions", json=CHAT | names)
            assert len(response.headers[HEADER]) <= parameter_policy.MAX_NAMES * (parameter_policy.MAX_NAME + 2)
    assert len(caplog.records) == parameter_policy.MAX_LOGGED


def test_the_official_client_talks_on_with_whole_messages(backend, config):
    with (
        served(create_app(backend, backend.tokenizer, config)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api,
    ):
        messages = [USER]
        for _ in range(2):
            reply = api.chat.completions.create(model="tiny", messages=messages)
            messages += [reply.choices[0].message.model_dump(), USER]
        parsed = api.beta.chat.completions.parse(model="tiny", messages=messages)  # adds `parsed` to the message
        messages += [parsed.choices[0].message, USER]
        with api.chat.completions.stream(model="tiny", messages=messages) as stream:
            last = stream.get_final_completion().choices[0].message
        raw = api.chat.completions.with_raw_response.create(model="tiny", messages=[*messages, last.to_dict(), USER])
    assert raw.parse().choices[0].message.content == ANSWER
    assert prompt_of(backend).count(ANSWER) == 4
