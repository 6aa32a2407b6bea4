"""What decides about a request's turn reaches the engine: its priority, its tenant, its session, its namespace, its deadline."""

import json
import time

import pytest
from fastapi.testclient import TestClient

from jaxinfer.request import FinishReason, RequestContext
from server.api_keys import tenant_name
from server.batches.runner import PRIORITY
from server.config import ServerConfig
from server.openai.app import create_app
from server.openai.caller import ANONYMOUS, Caller
from server.openai.protocol import TIERS, CompletionRequest
from tests.server.fakes import ANSWER
from tests.server.sse import chunks_of, events_of

BODIES = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "Say", "max_tokens": 100},
}
TEXT = "/v1/completions"
SESSION = "x-session-affinity"


@pytest.fixture
def ask(backend, tokenizer):
    """Posts to a server of its own settings, with a key, and gives the answer and the context that the engine got."""

    def ask(change=None, headers=None, *, key=None, url=TEXT, **settings):
        config = ServerConfig(served_model_name=("tiny",), **settings)
        with TestClient(create_app(backend, tokenizer, config)) as client:
            given = dict(headers or {}) | ({"authorization": f"Bearer {key}"} if key else {})
            encoded = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in given.items()]
            answer = client.post(url, json=BODIES[url] | (change or {}), headers=encoded)
        return answer, backend.contexts[-1] if answer.status_code == 200 else None

    return ask


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize(
    ("change", "priority", "tier"),
    [
        ({}, 0, "default"),
        ({"service_tier": None}, 0, "default"),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "default"}, 0, "default"),
        ({"service_tier": "flex"}, 10, "flex"),
        ({"service_tier": "priority"}, -10, "priority"),
        ({"priority": 3}, 3, None),
        ({"priority": -(2**31), "service_tier": "auto"}, -(2**31), None),
        ({"priority": 10}, 10, "flex"),
        ({"priority": 0}, 0, "default"),
    ],
)
def test_a_tier_is_a_priority_and_the_reply_names_the_tier(ask, url, change, priority, tier):
    answer, context = ask(change, url=url)
    assert (context.priority, answer.json().get("service_tier")) == (priority, tier)
    answer, context = ask(change | {"stream": True}, url=url)
    assert context.priority == priority
    assert {chunk.get("service_tier") for chunk in chunks_of(answer)} == {tier}


def test_only_priority_keys_go_ahead_of_others_where_there_are_any(ask):
    keys = {"api_keys": ("plain", "first"), "priority_keys": ("first",)}
    for change, plain, first in (
        ({"service_tier": "priority"}, (0, "default"), (-10, "priority")),
        ({"priority": -1}, (0, "default"), (-1, None)),
        ({"service_tier": "flex"}, (10, "flex"), (10, "flex")),
    ):
        for key, expected in (("plain", plain), ("first", first)):
            answer, context = ask(change, key=key, **keys)
            assert (context.priority, answer.json().get("service_tier")) == expected
    _, context = ask({"service_tier": "priority"}, key="plain", api_keys=("plain", "first"))
    assert context.priority == -10


def test_a_batchs_priority_is_its_own_and_behind_every_tier():
    body = CompletionRequest(model="tiny", prompt="x", service_tier="priority")
    assert Caller(priority=PRIORITY).context(body).priority == PRIORITY > max(TIERS.values())


def test_a_key_is_a_tenant_whose_name_does_not_give_it_away(ask):
    keys = ("sk-one-0123", "sk-twö-4567")
    tenants = [ask(key=key, api_keys=keys)[1].tenant for key in (*keys, *keys)]
    assert tenants[:2] == tenants[2:] == [tenant_name(key) for key in keys]
    assert len(set(tenants)) == 2
    assert not any(part in name for name in tenants for part in ("one", "tw", "0123", "4567", "sk-"))
    assert ask()[1].tenant == ANONYMOUS


def test_namespaces_are_apart_by_key_and_by_salt(ask):
    keys = {"api_keys": ("a", "b")}
    asked = [
        ask(key="a", **keys),
        ask(key="b", **keys),
        ask({"cache_salt": "s"}, key="a", **keys),
        ask({"cache_salt": "t"}, key="a", **keys),
        ask({"cache_salt": "s"}, key="b", **keys),
    ]
    namespaces = [context.namespace for _, context in asked]
    assert len(set(namespaces)) == 5
    assert ask({"cache_salt": "s"}, {SESSION: "x"}, key="a", **keys)[1].namespace == namespaces[2]
    assert ask()[1].namespace == ask({"user": "someone"})[1].namespace != ask({"cache_salt": "s"})[1].namespace


def test_a_namespace_is_short_and_holds_no_salt(ask):
    salt = "secret" * 5000
    namespace = ask({"cache_salt": salt})[1].namespace
    assert len(namespace) < 100
    assert "secret" not in namespace
    assert namespace != ask({"cache_salt": salt + "!"})[1].namespace


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("url", BODIES)
def test_a_session_reaches_the_engine_and_is_sent_back(ask, url, stream):
    name = "conversation-7/" + "~!" * 120
    answer, context = ask({"stream": stream}, {SESSION: name}, url=url)
    assert answer.headers[SESSION] == name
    assert context.session.endswith(name)
    answer, context = ask({"stream": stream}, url=url)
    assert context.session is None
    assert SESSION not in answer.headers


def test_equal_names_of_two_tenants_are_two_sessions(ask):
    keys = {"api_keys": ("a", "b")}
    first, again, other = (ask(headers={SESSION: "s"}, key=key, **keys)[1].session for key in "aab")
    assert first == again != other


def test_a_session_is_sent_back_with_an_error_too(ask):
    answer, _ = ask({"n": 0}, {SESSION: "s"})
    assert (answer.status_code, answer.headers[SESSION]) == (400, "s")


@pytest.mark.parametrize("name", ["", "a b", "x" * 257, b"caf\xc3\xa9", "tab\there"])
def test_a_session_that_is_no_name_is_refused(ask, backend, name):
    answer, _ = ask(headers={SESSION: name})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (SESSION, "invalid_value")
    assert "1 to 256 visible ASCII characters" in error["message"]
    assert backend.seen == []


@pytest.mark.parametrize(
    ("change", "settings", "seconds"),
    [
        ({}, {}, None),
        ({"timeout": 30}, {}, 30),
        ({"timeout": 0.5}, {}, 0.5),
        ({}, {"request_timeout": 60.0}, 60),
        ({"timeout": 30}, {"request_timeout": 60.0}, 30),
        ({"timeout": 1e9}, {"request_timeout": 60.0}, 60),
    ],
)
def test_a_timeout_is_a_deadline_and_the_servers_is_the_most(ask, change, settings, seconds):
    before = time.monotonic()
    # What OpenAI's client sends of its own accord is its own patience.
    _, context = ask(change, {"x-stainless-timeout": "7", "x-stainless-read-timeout": "7"}, **settings)
    if seconds is None:
        assert context.deadline is None
    else:
        assert before + seconds <= context.deadline <= time.monotonic() + seconds


def test_all_prompts_of_a_body_have_one_turn(backend, client):
    body = BODIES[TEXT] | {"prompt": ["a", "b", "c"], "priority": 4, "timeout": 9, "cache_salt": "s"}
    assert client.post(TEXT, json=body, headers={SESSION: "x"}).status_code == 200
    assert len(backend.contexts) == 3
    assert len(set(backend.contexts)) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "change"), [*((url, {}) for url in BODIES), *((url, {"n": 2}) for url in BODIES), (TEXT, {"prompt": ["a", "b"]})]
)
def test_a_request_whose_time_is_up_before_anything_was_sent_is_408(client, backend, url, change, stream):
    backend.gives_up = FinishReason.TIMEOUT
    answer = client.post(url, json=BODIES[url] | change | {"stream": stream})
    assert answer.status_code == 408
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("timeout", "timeout", None)
    assert answer.headers["x-should-retry"] == "false"
    assert backend.num_open == 0


@pytest.mark.parametrize("url", BODIES)
def test_a_request_whose_time_is_up_half_way_is_408_unless_it_streams(client, backend, url):
    backend.gives_up, backend.hold_after = FinishReason.TIMEOUT, 5
    assert client.post(url, json=BODIES[url]).status_code == 408
    *chunks, last = events_of(client.post(url, json=BODIES[url] | {"stream": True}))
    assert json.loads(last)["error"]["code"] == "timeout"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in choices) == ANSWER[:5]
    assert not any(c["finish_reason"] for c in choices)


def test_without_a_server_a_caller_is_nobody_in_particular():
    body = CompletionRequest(model="tiny", prompt="x")
    assert Caller().context(body) == RequestContext(tenant=ANONYMOUS, namespace=ANONYMOUS)
