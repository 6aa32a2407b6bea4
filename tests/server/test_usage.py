"""What a request took is told in its reply, summed by tenant, and written to the usage log however it ended."""

import asyncio
import json
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.config import ConfigError
from jaxinfer.request import DeviceUsage, FinishReason, OutputDelta, RequestError
from server.api_keys import tenant_name
from server.backend import Overloaded, Unavailable
from server.config import ServerConfig
from server.openai import chat, completions
from server.openai.app import create_app
from server.openai.caller import ANONYMOUS, Caller
from server.openai.protocol import ChatRequest, CompletionRequest
from server.openai.service import Service
from server.usage import Outcome, RequestIdentity, UsageMeter
from server.usage_log import UsageLog
from tests.server.fakes import ANSWER
from tests.server.sse import chunks_of

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Tell", "max_tokens": 100}
NUM_ANSWER = len(ANSWER.encode())
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
NOTHING = {"queue_seconds": None, "prefill_seconds": None, "decode_seconds": None}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# In the reply


@pytest.mark.parametrize("url", [CHAT_URL, TEXT_URL])
def test_sequences_share_one_prompt_and_the_cached_part_is_the_firsts(client, url):
    """The siblings start from the pages that the first sequence has computed: that is no hit."""
    body = CHAT if url == CHAT_URL else TEXT
    one, three = (client.post(url, json=body | {"n": n}).json()["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * NUM_ANSWER
    assert three["prompt_tokens_details"] == one["prompt_tokens_details"] == {"cached_tokens": 3}
    assert three["jaxinfer"] == {"queue_seconds": 0.25, "prefill_seconds": 0.5, "decode_seconds": 0.375}


def test_prompts_are_summed(client):
    usage = client.post(TEXT_URL, json=TEXT | {"prompt": ["Tell", "me", "more"], "n": 2}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 6 * NUM_ANSWER, 10 + 6 * NUM_ANSWER)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}  # of the two prompts over three tokens
    assert usage["jaxinfer"] == {"queue_seconds": 0.75, "prefill_seconds": 1.5, "decode_seconds": 0.75}


@pytest.mark.parametrize(("url", "body"), [(CHAT_URL, CHAT | {"n": 2}), (TEXT_URL, TEXT | {"prompt": ["Tell", "me"], "n": 2})])
def test_a_streams_usage_is_the_whole_replys(client, url, body):
    whole = client.post(url, json=body).json()["usage"]
    assert chunks_of(client.post(url, json=body | STREAM))[-1]["usage"] == whole
    assert whole["jaxinfer"]["decode_seconds"] > 0


def test_an_engine_that_measures_nothing_gives_nulls(client, monkeypatch):
    monkeypatch.setattr("tests.server.fakes.device_usage", lambda *_: None)
    assert client.post(TEXT_URL, json=TEXT).json()["usage"]["jaxinfer"] == NOTHING


# In the log


@pytest.fixture
def log_path(tmp_path):
    return tmp_path / "usage.jsonl"


@pytest.fixture
def service(backend, tokenizer, config, log_path):
    with UsageLog(str(log_path)) as log:
        yield Service(backend, tokenizer, config, 0, UsageMeter(log=log))


def record_of(log_path):
    """The only line, once it is written."""
    wait_for_lines(log_path, 1)
    [record] = lines_of(log_path)
    return record


def test_a_line_says_whose_request_it_was_and_what_it_took(backend, tokenizer, log_path):
    config = ServerConfig(served_model_name=("tiny",), api_keys=("a-key",))
    started = datetime.now(UTC) - timedelta(seconds=1)
    with UsageLog(str(log_path)) as log, TestClient(create_app(backend, tokenizer, config, log)) as client:
        headers = {"authorization": "Bearer a-key", "x-session-affinity": "talk"}
        answers = [
            client.post(TEXT_URL, json=TEXT | {"prompt": ["Tell", "me"], "service_tier": "flex", "n": 2}, headers=headers),
            client.post(CHAT_URL, json=CHAT | {"priority": 3, "max_tokens": 4}, headers=headers),
            client.post(CHAT_URL, json=CHAT | STREAM, headers=headers),
        ]
        client.post(CHAT_URL, json=CHAT | {"n": 0}, headers=headers)  # refused before it began
        client.post(CHAT_URL, json=CHAT)  # without a key
    *records, invalid, anonymous = lines_of(log_path)
    assert [(line["outcome"], line["tenant"], line["status"]) for line in (invalid, anonymous)] == [
        ("refused", tenant_name("a-key"), 400),
        ("refused", None, 401),
    ]
    for record, answer in zip(records, answers, strict=True):
        assert started <= datetime.fromisoformat(record.pop("time")) <= datetime.now(UTC)
        assert record.pop("request_id") == answer.headers["x-request-id"]
        assert (record.pop("tenant"), record.pop("session"), record.pop("model")) == (tenant_name("a-key"), "talk", "tiny")
    text, limited, streamed = records
    assert text == {
        "id": answers[0].json()["id"],
        "endpoint": TEXT_URL,
        "service_tier": "flex",
        "priority": 10,
        "outcome": "finished",
        "finish_reasons": ["stop"] * 4,
        "input_tokens": 6,
        "cached_input_tokens": 3,
        "output_tokens": 4 * NUM_ANSWER,
        "queue_seconds": 0.5,
        "prefill_seconds": 1.0,
        "decode_seconds": 0.5,
    }
    assert (limited["endpoint"], limited["service_tier"], limited["priority"]) == (CHAT_URL, None, 3)
    assert (limited["finish_reasons"], limited["output_tokens"]) == (["length"], 4)
    assert (streamed["id"], streamed["outcome"]) == (chunks_of(answers[2])[0]["id"], "finished")
    assert "a-key" not in log_path.read_text()


@pytest.mark.parametrize("how", ["stream", "stream waiting", "whole"])
def test_a_client_that_leaves_is_recorded_with_what_came_until_then(service, backend, log_path, how):
    backend.hold_after = 5
    backend.hold.clear()

    async def leave():
        if how == "stream":
            async with aclosing(chat.stream(service, ChatRequest.model_validate(CHAT | {"stream": True}))) as chunks:
                for _ in range(4):  # the role and three tokens
                    await anext(chunks)
            return
        if how == "whole":
            work = chat.respond(service, ChatRequest.model_validate(CHAT))
        else:
            work = _exhaust(completions.stream(service, CompletionRequest.model_validate(TEXT | {"stream": True})))
        task = asyncio.create_task(work)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    record = record_of(log_path)
    assert (record["outcome"], record["finish_reasons"]) == ("disconnected", [None])
    assert record["output_tokens"] == (3 if how == "stream" else 5)
    assert record["input_tokens"] == (4 if how == "stream waiting" else 21)
    assert record["cached_input_tokens"] == 3


async def _exhaust(chunks):
    async for _ in chunks:
        pass


@pytest.mark.parametrize("num_deltas", [0, 5])
def test_a_timeout_bills_a_prompt_only_if_it_was_computed(service, backend, log_path, num_deltas):
    backend.gives_up, backend.hold_after = FinishReason.TIMEOUT, num_deltas
    with pytest.raises(Exception, match="timeout"):
        asyncio.run(chat.respond(service, ChatRequest.model_validate(CHAT | {"n": 2})))
    record = record_of(log_path)
    assert (record["outcome"], record["finish_reasons"]) == ("timeout", ["timeout"] * 2)
    assert (record["input_tokens"], record["output_tokens"]) == (21 if num_deltas else 0, num_deltas)
    assert record["queue_seconds"] == 0.25


def test_prefill_that_was_measured_bills_its_prompt_even_without_a_token():
    usage = UsageMeter().measure(RequestIdentity("", "", "", None, "", "", None, 0), [[1, 2, 3], [4, 5]], 1)
    usage.add(OutputDelta("", 0, finish_reason=FinishReason.TIMEOUT, device_usage=DeviceUsage(1.0, 0.5, 0.0)), 0)
    usage.add(OutputDelta("", 0, finish_reason=FinishReason.TIMEOUT, device_usage=DeviceUsage(1.0, 0.0, 0.0)), 1)
    assert usage.input_tokens == 3


@pytest.mark.parametrize(
    ("error", "outcome"), [(ZeroDivisionError(), "failed"), (Unavailable("it broke"), "aborted"), (RequestError("no pages"), "refused")]
)
def test_an_error_half_way_is_recorded(service, backend, log_path, error, outcome):
    backend.error, backend.hold_after = error, 2
    with pytest.raises(type(error)):
        asyncio.run(completions.respond(service, CompletionRequest.model_validate(TEXT)))
    record = record_of(log_path)
    assert (record["outcome"], record["output_tokens"], record["finish_reasons"]) == (outcome, 2, [None])
    assert service.usage.totals[ANONYMOUS].requests == {outcome: 1}


def test_what_the_backend_gives_up_is_recorded(service, backend, log_path):
    backend.gives_up, backend.hold_after = FinishReason.ABORT, 2
    with pytest.raises(Unavailable):
        asyncio.run(_exhaust(chat.stream(service, ChatRequest.model_validate(CHAT | {"stream": True}))))
    assert record_of(log_path)["outcome"] == "aborted"


@pytest.mark.parametrize("error", [Overloaded(3.0), RequestError("too long"), Unavailable("shutting down")])
def test_what_is_refused_before_it_began_is_counted_and_logged_by_the_http_front_alone(service, backend, log_path, error):
    backend.error = error
    for work in (chat.respond(service, ChatRequest.model_validate(CHAT)), completions.respond(service, CompletionRequest(**TEXT))):
        with pytest.raises(type(error)):
            asyncio.run(work)
    totals = service.usage.totals[ANONYMOUS]
    assert totals.requests == {Outcome.REFUSED: 2}
    assert totals.input_tokens == 0
    backend.error = None
    asyncio.run(chat.respond(service, ChatRequest.model_validate(CHAT)))
    assert record_of(log_path)["outcome"] == "finished"


def test_a_finished_stream_is_finished_though_its_client_leaves_before_the_usage(service, log_path):
    async def leave():
        async with aclosing(chat.stream(service, ChatRequest.model_validate(CHAT | STREAM))) as chunks:
            async for chunk in chunks:
                if chunk.choices and chunk.choices[0].finish_reason:
                    await anext(chunks)
                    return

    asyncio.run(leave())
    assert record_of(log_path)["outcome"] == "finished"


# The file


def test_lines_are_added_to_what_the_file_holds(log_path):
    log_path.write_text('{"old": 1}\n')
    with UsageLog(str(log_path)) as log:
        log.write({"new": "é"})
    assert lines_of(log_path) == [{"old": 1}, {"new": "é"}]


def test_writing_waits_for_no_disk(log_path):
    with ExitStack() as stack:
        log = stack.enter_context(UsageLog(str(log_path)))
        stack.enter_context(log._file.lock)  # the disk hangs
        for number in range(1000):
            log.write({"number": number})
        assert lines_of(log_path) == []
    assert [line["number"] for line in lines_of(log_path)] == list(range(1000))


def test_a_rotated_file_is_followed_by_a_new_one(log_path):
    with UsageLog(str(log_path)) as log:
        log.write({"number": 1})
        wait_for_lines(log_path, 1)
        log_path.rename(log_path.with_suffix(".1"))
        log.write({"number": 2})
    assert lines_of(log_path.with_suffix(".1")) == [{"number": 1}]
    assert lines_of(log_path) == [{"number": 2}]


def test_what_can_not_be_written_is_told_to_the_servers_log_and_later_lines_go_on(tmp_path, caplog):
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "usage.jsonl"
    with UsageLog(str(path)) as log:
        path.unlink()
        folder.rmdir()
        log.write({"number": 1})
        log.write({"number": 2})
        for _ in range(500):
            if len(caplog.messages) == 2:
                break
            asyncio.run(asyncio.sleep(0.01))
        folder.mkdir()
        log.write({"number": 3})
    assert lines_of(path) == [{"number": 3}]
    assert len(caplog.messages) == 2
    for message, number in zip(caplog.messages, (1, 2), strict=True):
        assert "can't be written" in message
        assert f'{{"number": {number}}}' in message


@pytest.mark.parametrize("name", ["", "no/such/folder"])
def test_a_file_that_can_not_be_opened_is_told_at_once(tmp_path, name):
    with pytest.raises(ConfigError, match=r"usage_log is '.*'; name a file that can be written|usage_log is '.*': .*; name a file"):
        UsageLog(str(tmp_path / name))


def wait_for_lines(path, count):
    for _ in range(500):
        if path.read_text().count("\n") == count:
            return
        asyncio.run(asyncio.sleep(0.01))
    raise AssertionError(path.read_text())


# In /metrics


def tenant_samples(client):
    return {
        (
            sample.name.removeprefix("jaxinfer_tenant_"),
            *(sample.labels[label] for label in ("tenant", "outcome") if label in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("jaxinfer_tenant_")
    }


def test_metrics_sum_by_key_and_name_no_tenant_but_the_keys(backend, tokenizer):
    config = ServerConfig(served_model_name=("tiny",), api_keys=("a", "b", "idle"))
    one, two, idle = (tenant_name(key) for key in config.api_keys)
    with TestClient(create_app(backend, tokenizer, config)) as client:
        for key, times in (("a", 2), ("b", 1), ("wrong", 3)):
            for _ in range(times):
                client.post(TEXT_URL, json=TEXT, headers={"authorization": f"Bearer {key}"})
        backend.is_full = True
        client.post(TEXT_URL, json=TEXT, headers={"authorization": "Bearer b"})
        found = tenant_samples(client)
    assert {tenant for _, tenant, *_ in found} == {one, two, idle}
    for tenant, times in ((one, 2), (two, 1), (idle, 0)):
        assert found["input_tokens_total", tenant] == 4 * times
        assert found["cached_input_tokens_total", tenant] == 3 * times
        assert found["output_tokens_total", tenant] == NUM_ANSWER * times
        assert found["queue_seconds_total", tenant] == 0.25 * times
        assert found["prefill_seconds_total", tenant] == 0.5 * times
        assert found["decode_seconds_total", tenant] == 0.125 * times
        assert found["requests_total", tenant, "finished"] == times
    assert [found["requests_total", tenant, "refused"] for tenant in (one, two, idle)] == [0, 1, 0]


def test_without_keys_there_is_one_tenant(client):
    client.post(TEXT_URL, json=TEXT)
    assert {tenant for _, tenant, *_ in tenant_samples(client)} == {ANONYMOUS}


def test_a_batch_counts_for_its_tenant(service):
    asyncio.run(completions.respond(service, CompletionRequest(**TEXT), Caller(tenant="key-x")))
    assert service.usage.totals["key-x"].output_tokens == NUM_ANSWER
