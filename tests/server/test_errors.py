"""Every bad request is told what is wrong, in OpenAI's form, and the server goes on."""

import asyncio
import json

import pytest
from fastapi import Request
from fastapi.testclient import TestClient

from jaxinfer.request import RequestError
from server.backend import Unavailable
from server.config import ServerConfig
from server.openai.app import create_app
from server.openai.body import read_body
from server.openai.errors import ApiError
from tests.server.fakes import ANSWER
from tests.server.sse import events_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Say"}


def error_of(response, status, param=None, code=None):
    """The message of an error in OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    [(key, error)] = response.json().items()
    assert key == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    return error["message"]


TOOL = {"type": "function", "function": {"name": "f"}}


def called(arguments: str) -> dict:
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]}


def messages(*items):
    return {"messages": list(items)}


BAD_CHATS = [
    # what is sent, param, code, what the message says
    ({"tempreature": 1}, "tempreature", "unknown_parameter", "did you mean 'temperature'?"),
    ({"messages": None}, "messages", "invalid_type", "valid list"),
    ({"messages": "Hi"}, "messages", "invalid_type", "valid list"),
    (messages(), "messages", "invalid_value", "must not be empty"),
    (messages("Hi"), "messages[0]", "invalid_type", "'Hi'"),
    (messages({"role": "user"}), "messages[0].content", "missing_required_parameter", "missing"),
    (messages({"content": "Hi"}), "messages[0].role", "missing_required_parameter", "missing"),
    (messages({"role": "", "content": ""}), "messages[0].role", "invalid_value", "must not be empty"),
    (
        messages({"role": "function", "content": ""}),
        "messages[0].role",
        "unsupported_parameter",
        "send what a tool returned with role 'tool'",
    ),
    (messages({"role": "tool", "content": ""}), "messages[0].tool_call_id", "missing_required_parameter", "missing"),
    (messages({"role": "user", "content": 3}), "messages[0].content", "invalid_type", "3: it must be a string or a list of text parts"),
    (messages({"role": "user", "content": None}), "messages[0].content", "invalid_type", "None"),
    (messages({"role": "assistant", "content": None}), "messages[0].content", "invalid_value", "content is null"),
    (messages({"role": "assistant", "tool_calls": []}), "messages[0].content", "invalid_value", "content is null"),
    (messages({"role": "user", "content": []}), "messages[0].content", "invalid_value", "must not be empty"),
    (messages({"role": "user", "content": "\ud83d"}), "messages[0].content", "invalid_value", "surrogate"),
    (messages({"role": "user", "content": "", "nam": ""}), "messages[0].nam", "unknown_parameter", "did you mean 'name'?"),
    (messages({"role": "user", "content": "", "tool_calls": [{}]}), "messages[0].tool_calls", "unsupported_parameter", "tool_calls"),
    (messages({"role": "assistant", "tool_calls": [{}]}), "messages[0].tool_calls[0].id", "missing_required_parameter", "missing"),
    (messages(called("[1]")), "messages[0].tool_calls[0].function.arguments", "invalid_value", "'[1]': it must be a JSON object"),
    (messages(called("{")), "messages[0].tool_calls[0].function.arguments", "invalid_value", "'{': it must be a JSON object"),
    (
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        "messages[0].content[0].type",
        "unsupported_content",
        "'image_url', which is not implemented: this model reads text only",
    ),
    (
        messages({"role": "user", "content": [{"type": "text", "txet": ""}]}),
        "messages[0].content[0].text",
        "missing_required_parameter",
        "missing",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter", "missing"),
    ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type", "invalid_value", "'code': it must be 'function'"),
    (
        {"tools": [TOOL, TOOL]},
        "tools",
        "invalid_value",
        "tools[1] has the name 'f', as tools[0] has: give each tool its own",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "invalid_value",
        "tool_choice names 'g', which is none of the tools",
    ),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "invalid_value", "'any'"),
    ({"tool_choice": 5}, "tool_choice", "invalid_type", "it must be 'none', 'auto', 'required' or an object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value", "messages can't be a variable"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "tool_choice is 'required' without tools: send tools"),
    ({"response_format": {"type": "json"}}, "response_format", "invalid_value", "its type must be text, json_object or json_schema"),
    ({"regex": "a+"}, "regex", "unsupported_parameter", "regex is not implemented"),
    ({"n": 0}, "n", "invalid_value", "0: it must be an integer from 1 to 128"),
    ({"n": 10**9}, "n", "invalid_value", "1000000000: it must be an integer from 1 to 128"),
    ({"n": 1.5}, "n", "invalid_type", "1.5: it must be a valid integer"),
    ({"n": True}, "n", "invalid_type", "True: it must be a valid integer"),
    ({"n": "2"}, "n", "invalid_type", "'2': it must be a valid integer"),
    ({"temperature": -0.1}, "temperature", "invalid_value", "-0.1: it must be a number from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "invalid_type", "'hot': it must be a valid number"),
    ({"top_p": 0}, "top_p", "invalid_value", "above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "invalid_value", "-2"),
    ({"min_p": 2}, "min_p", "invalid_value", "from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "from 1e-30 to 100"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", "invalid_value", "from 1e-30 to 100"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value", "from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value", "from -2 to 2"),
    ({"seed": 2**63}, "seed", "invalid_value", "seed"),
    ({"stop": 3}, "stop", "invalid_type", "a string or a list of strings"),
    ({"stop": ["a", 3]}, "stop[1]", "invalid_type", "valid string"),
    ({"stop": ""}, "stop", "invalid_value", "not be empty"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value", "300: the model's go from 0 to 257"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "'a': it must be a token id"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_value", "300: the model's go from 0 to 257"),
    ({"logit_bias": {"3": 101}}, "logit_bias", "invalid_value", "from -100 to 100"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "at least 1"),
    ({"max_completion_tokens": 10**12}, "max_completion_tokens", "invalid_value", "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value", "give one of them"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value", "not be over max_tokens"),
    ({"top_logprobs": 1}, "top_logprobs", "invalid_value", "set logprobs to true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "from 0 to 20"),
    ({"logprobs": 1}, "logprobs", "invalid_type", "valid boolean"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "unknown_parameter", "include_usage"),
    (messages({"role": "user", "content": "x" * 600}), "messages", "context_length_exceeded", "context is 512 tokens"),
    ({"model": 3}, "model", "invalid_type", "valid string"),
    ({"service_tier": "scale"}, "service_tier", "invalid_value", "'scale': it must be 'auto', 'default', 'flex' or 'priority'"),
    ({"priority": 2**31}, "priority", "invalid_value", "2147483648: it must be an integer"),
    ({"priority": "high"}, "priority", "invalid_type", "'high': it must be a valid integer"),
    ({"priority": 3, "service_tier": "flex"}, "priority", "invalid_value", "priority is 3 and service_tier is 'flex': give one of them"),
    ({"timeout": 0}, "timeout", "invalid_value", "timeout is 0: it must be a number of seconds above 0"),
    ({"timeout": -3.5}, "timeout", "invalid_value", "-3.5"),
    ({"timeout": "3"}, "timeout", "invalid_type", "'3': it must be a valid number"),
    ({"timeout": True}, "timeout", "invalid_type", "True"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value", "must not be empty"),
    ({"cache_salt": "\ud83d"}, "cache_salt", "invalid_value", "surrogate"),
]


@pytest.mark.parametrize(("change", "param", "code", "says"), BAD_CHATS, ids=lambda value: json.dumps(value)[:40])
def test_a_bad_chat_names_the_field_the_value_and_what_would_be_right(client, backend, change, param, code, says):
    body = json.dumps(CHAT | change)  # not the client's own encoding, which refuses lone surrogates itself
    message = error_of(client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"}), 400, param, code)
    assert says in message
    assert len(message) < 400
    assert backend.seen == []


# What is refused only where parameters are read strictly.
BAD_IF_STRICT = [
    ({"zzz": 1}, "zzz", "unknown_parameter", "unknown parameter: 'zzz'"),
    ({"zzz": None}, "zzz", "unknown_parameter", "unknown parameter: 'zzz'"),
    ({"<string>": 1}, "<string>", "unknown_parameter", "unknown parameter"),
    ({"\ud800": 1}, None, "invalid_value", "unicode"),
    ({"stream_options": {}}, "stream_options", "invalid_value", "without stream"),
    ({"verbosity": "low"}, "verbosity", "unsupported_parameter", "verbosity is not implemented"),
    ({"store": True}, "store", "unsupported_parameter", "store is not implemented"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter", "reasoning_effort is not implemented"),
    (messages({"role": "user", "content": "", "refusal": "no"}), "messages[0].refusal", "unsupported_parameter", "refusal"),
    (messages({"role": "user", "content": "", "parsed": None}), "messages[0].parsed", "unknown_parameter", "parsed"),
    (
        messages({"role": "user", "content": [{"type": "text", "txet": ""}]}),
        "messages[0].content[0].txet",
        "unknown_parameter",
        "did you mean 'text'?",
    ),
]


@pytest.mark.parametrize(("change", "param", "code", "says"), BAD_IF_STRICT, ids=lambda value: json.dumps(value)[:40])
def test_strict_parameters_are_all_known(backend, tokenizer, change, param, code, says):
    config = ServerConfig(served_model_name=("tiny",), strict_parameters=True)
    with TestClient(create_app(backend, tokenizer, config)) as client:
        headers = {"content-type": "application/json"}
        response = client.post("/v1/chat/completions", content=json.dumps(CHAT | change), headers=headers)
    assert says in error_of(response, 400, param, code)
    assert backend.seen == []


def test_an_error_about_several_names_has_them_all(client):
    faults = {"grammar": "x", "audio": {}, "tempreature": 1, "n": "2"}
    faults |= messages({"role": "user", "content": 3}, {"role": "user", "content": "", "nam": ""})
    message = error_of(client.post("/v1/chat/completions", json=CHAT | faults), 400, "grammar", "unsupported_parameter")
    for name in (*("grammar and audio are not implemented", "tempreature", "did you mean 'temperature'?", "n is '2'"),):
        assert name in message
    assert "messages[0].content is 3" in message and "messages[1].nam: unknown parameter: 'nam'; did you mean 'name'?" in message
    wrong = {"model": "tiny", **dict.fromkeys(["messages", "n", "top_k"], "x")}
    message = error_of(client.post("/v1/chat/completions", json=wrong), 400, "n", "invalid_type")
    assert "messages is 'x'" in message and "top_k is 'x'" in message
    many = {"model": "tiny", "messages": [{"role": "user", "content": 1}] * 500}
    message = error_of(client.post("/v1/chat/completions", json=many), 400, "messages[0].content", "invalid_type")
    assert message.endswith("and 492 more faults") and len(message) < 1000


BAD_TEXTS = [
    ({"prompt": ""}, "prompt", "invalid_value", "must not be empty"),
    ({"prompt": []}, "prompt", "invalid_value", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "invalid_value", "must not be empty"),
    ({"prompt": [[]]}, "prompt[0]", "invalid_value", "must not be empty"),
    ({"prompt": None}, "prompt", "invalid_type", "a list of token ids or a list of such lists"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type", "a list of token ids"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type", "'a': it must be a valid integer"),
    ({"prompt": [[1], [2, None]]}, "prompt[1][1]", "invalid_type", "None"),
    ({"prompt": [True]}, "prompt", "invalid_type", "a list of token ids"),
    ({"prompt": [-1]}, "prompt[0]", "invalid_value", "greater than or equal to 0"),
    ({"prompt": [258]}, "prompt", "invalid_value", "258: the model's go from 0 to 257"),
    ({"prompt": [1] * 512}, "prompt", "context_length_exceeded", "shorten prompt"),
    ({"prompt": ["a"] * 129}, "prompt", "invalid_value", "129 prompts: at most 128"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "echo"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value", "-1"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_value", "max_tokens"),
    ({"logprobs": 21}, "logprobs", "invalid_value", "from 0 to 20"),
    ({"logprobs": True}, "logprobs", "invalid_type", "valid integer"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter", "suffix is not implemented"),
    ({"best_of": 3}, "best_of", "unsupported_parameter", "only the value of n"),
]


@pytest.mark.parametrize(("change", "param", "code", "says"), BAD_TEXTS, ids=lambda value: json.dumps(value)[:40])
def test_a_bad_completion_names_the_field_the_value_and_what_would_be_right(client, backend, change, param, code, says):
    assert says in error_of(client.post("/v1/completions", json=TEXT | change), 400, param, code)
    assert backend.seen == []


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b"\xff\xfe", b"[" * 60, b'{"n": ' + b"1" * 5000 + b"}", b'{"model": "tiny"} trailing']
)
def test_what_is_no_json_is_told_so(client, raw):
    error_of(client.post("/v1/completions", content=raw, headers={"content-type": "application/json"}), 400, None, "invalid_json")


@pytest.mark.parametrize("raw", [b"[]", b"3", b"null", b'"text"'])
def test_what_is_no_object_is_told_so(client, raw):
    message = error_of(client.post("/v1/completions", content=raw, headers={"content-type": "application/json"}), 400, None, "invalid_type")
    assert "JSON object" in message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(client, number):
    raw = json.dumps(TEXT)[:-1] + f', "temperature": {number}}}'
    error_of(client.post("/v1/completions", content=raw, headers={"content-type": "application/json"}), 400, "temperature", "invalid_value")


def test_a_form_is_told_to_be_json(client):
    assert "application/json" in error_of(client.post("/v1/completions", data={"prompt": "x"}), 400, None, "invalid_content_type")


def test_a_missing_model_is_400_and_an_unknown_one_404(client):
    error_of(client.post("/v1/completions", json={"prompt": "x"}), 400, "model", "missing_required_parameter")
    for url, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        assert "tiny" in error_of(client.post(url, json=body | {"model": "gpt-x"}), 404, "model", "model_not_found")
    error_of(client.get("/v1/models/gpt-x"), 404, "model", "model_not_found")


def test_unknown_urls_and_methods_are_told_so(client):
    error_of(client.get("/v1/nothing"), 404, None, "unknown_url")
    response = client.get("/v1/completions")
    error_of(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_a_body_over_the_limit_is_413_whether_declared_or_streamed(client):
    large = json.dumps(TEXT | {"prompt": "x" * 70_000}).encode()
    headers = {"content-type": "application/json"}
    assert "65536" in error_of(client.post("/v1/completions", content=large, headers=headers), 413, None, "body_too_large")
    error_of(client.post("/v1/completions", content=iter([large[:40_000], large[40_000:]]), headers=headers), 413, None, "body_too_large")


def test_reading_stops_where_the_limit_is_passed():
    num_read = 0

    async def endless():
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 1024, "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, endless)
    with pytest.raises(ApiError) as error:
        asyncio.run(read_body(request, 10 * 1024))
    assert (error.value.status, num_read) == (413, 11)


def test_a_full_queue_is_429_with_a_time_to_come_back(client, backend):
    backend.is_full = True
    for body in (TEXT, TEXT | {"stream": True}, TEXT | {"prompt": ["a", "b"]}):
        response = client.post("/v1/completions", json=body)
        error_of(response, 429, None, "rate_limit_exceeded")
        assert response.headers["retry-after"] == "7"
    assert backend.num_open == 0


def test_what_only_the_engine_finds_wrong_is_400(client, backend):
    backend.error = RequestError("prompt needs 9 pages: there are 4", "prompt", "context_length_exceeded")
    for stream in (False, True):
        message = error_of(client.post("/v1/completions", json=TEXT | {"stream": stream}), 400, "prompt", "context_length_exceeded")
        assert message == "prompt needs 9 pages: there are 4"


def test_a_failed_engine_is_503_and_health_says_why(client, backend):
    backend.failed = "the engine failed (RuntimeError: out of memory)"
    assert "out of memory" in error_of(client.post("/v1/completions", json=TEXT), 503, None, "service_unavailable")
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (503, 503)
    assert "out of memory" in client.get("/health").json()["status"]


def test_an_unexpected_error_is_500_without_its_details(client, backend):
    backend.error = ZeroDivisionError("secret")
    assert "secret" not in error_of(client.post("/v1/completions", json=TEXT), 500, None, "internal_error")
    backend.error = None
    assert client.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable("the engine failed"), "service_unavailable"), (ZeroDivisionError("secret"), "internal_error")]
)
def test_an_error_after_a_stream_began_ends_it_with_an_error_event(client, backend, error, code):
    backend.error, backend.hold_after = error, 5
    for url, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        response = client.post(url, json=body | {"stream": True})
        assert response.status_code == 200
        *chunks, last = events_of(response)
        assert json.loads(last)["error"]["code"] == code
        assert "secret" not in last
        texts = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in texts) == ANSWER[:5]
    assert backend.num_open == 0


def test_api_keys_guard_the_api_and_nothing_else(backend, tokenizer):
    config = ServerConfig(served_model_name=("tiny",), api_keys=("first", "sécond"))
    with TestClient(create_app(backend, tokenizer, config)) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}, {"authorization": "Bearer "}):
            response = client.post("/v1/completions", json=TEXT, headers=headers)
            error_of(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert client.get("/v1/models", headers=headers).status_code == 401
        for key in (b"first", "sécond".encode()):
            assert client.post("/v1/completions", json=TEXT, headers=[(b"authorization", b"Bearer " + key)]).status_code == 200
        assert {client.get(url).status_code for url in ("/health", "/ready", "/metrics", "/", "/stats")} == {200}


def test_while_shutting_down_new_requests_are_503(client, backend):
    client.app.state.traffic.close()
    assert "shutting down" in error_of(client.post("/v1/completions", json=TEXT), 503, None, "service_unavailable")
    assert (client.get("/ready").status_code, client.get("/health").status_code) == (503, 200)
    assert backend.seen == []
