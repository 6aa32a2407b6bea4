"""The client: what it measures, and that nothing which a server does goes by another name."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord, closed_loop, open_loop, open_session, send
from tests.benchmarks.scripted_server import answering, chunk, stream, usage

BODY = LoadRequest.of("/v1/completions", {"prompt": [1]})


def sent(handler, request: LoadRequest = BODY) -> RequestRecord:
    async def one() -> RequestRecord:
        async with answering(handler) as url, open_session(url) as session:
            return await send(session, request)

    return asyncio.run(one())


def test_a_stream_is_measured_token_by_token():
    record = sent(lambda r: stream(r, 0.05, chunk("a"), 0.1, chunk(""), chunk("b"), 0.02, chunk("c", "length"), usage(7, 4, 3), "[DONE]"))
    assert record.outcome is LoadOutcome.ANSWERED and record.choices == ["abc"]
    assert record.ttft >= 0.05
    assert len(record.gaps) == 2  # a chunk without text is no token
    assert record.gaps[0] >= 0.1 > record.gaps[1] >= 0.02
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 4, 3)
    assert record.time_per_token == pytest.approx(sum(record.gaps) / 3)


def test_a_token_without_text_still_has_a_time():
    record = sent(lambda r: stream(r, chunk("", "length"), usage(7, 1, None), "[DONE]"))
    assert record.ttft is not None and record.gaps == []
    assert record.time_per_token is None and record.cached_tokens is None


def test_latency_counts_from_when_a_request_was_due():
    record = RequestRecord(due=10.0, sent=12.0, arrivals=[13.0, 14.0])
    assert record.ttft == 3.0


async def _refuses(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "full"}}, status=json.loads(await request.read())["status"])


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (429, LoadOutcome.REFUSED),
        (503, LoadOutcome.REFUSED),
        (400, LoadOutcome.REJECTED),
        (413, LoadOutcome.REJECTED),
        (500, LoadOutcome.FAILED),
    ],
)
def test_other_answers_have_their_names(status, outcome):
    record = sent(_refuses, LoadRequest.of("/v1/completions", {"status": status}))
    assert (record.outcome, record.status) == (outcome, status)
    assert "full" in record.message
    assert record.ttft is None


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([chunk("a"), "[BREAK]"], LoadOutcome.BROKEN),
        ([chunk("a"), chunk("b", "length")], LoadOutcome.BROKEN),  # no [DONE]
        ([chunk("a"), "no json", "[DONE]"], LoadOutcome.BROKEN),
        ([chunk("a"), {"error": {"message": "the engine failed"}}, "[DONE]"], LoadOutcome.FAILED),
    ],
    ids=["cut", "no end", "garbage", "error event"],
)
def test_a_stream_that_ends_badly_is_no_answer(events, outcome):
    record = sent(lambda r: stream(r, *events))
    assert record.outcome is outcome
    assert record.message


def test_a_server_that_is_not_there():
    async def one() -> RequestRecord:
        async with open_session("http://127.0.0.1:9") as session:
            return await send(session, BODY)

    assert asyncio.run(one()).outcome is LoadOutcome.BROKEN


def test_whole_answers_are_read_too():
    answer = {"choices": [{"index": 0, "message": {"content": "hi"}}], "usage": usage(5, 2, 0)["usage"]}

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer)

    record = sent(handler)
    assert record.outcome is LoadOutcome.ANSWERED and record.choices == ["hi"] and record.output_tokens == 2


@pytest.mark.parametrize("leave", [{"disconnects_after": 2}, {"disconnects_at": 0.3}])
def test_a_client_that_leaves_closes_its_connection(leave):
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await stream(request, chunk("a"), chunk("b"), *[0.05, chunk("c")] * 1000, "[DONE]")
        except (ConnectionError, asyncio.CancelledError):
            gone.set()
            raise

    async def one() -> RequestRecord:
        async with answering(handler) as url, open_session(url) as session:
            record = await send(session, LoadRequest(BODY.path, BODY.body, **leave))
            await asyncio.wait_for(gone.wait(), 5)
            return record

    record = asyncio.run(one())
    assert record.outcome is LoadOutcome.LEFT
    assert record.arrivals


def test_an_open_loop_waits_for_no_answer_and_keeps_its_times():
    under_way = 0
    all_came = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal under_way
        under_way += 1
        if under_way == 5:
            all_came.set()
        await all_came.wait()  # nobody is answered before the last has come
        return await stream(request, chunk("a", "length"), "[DONE]")

    async def run() -> list[RequestRecord]:
        records: list[RequestRecord] = []
        async with answering(handler) as url, open_session(url) as session:
            await asyncio.wait_for(open_loop(session, ((0.05 * i, BODY) for i in range(5)), records), 10)
        return records

    records = asyncio.run(run())
    assert [r.outcome for r in records] == [LoadOutcome.ANSWERED] * 5
    assert [round(r.due - records[0].due, 6) for r in records] == [0.0, 0.05, 0.1, 0.15, 0.2]
    assert all(r.sent >= r.due for r in records)
    assert records[0].ttft >= 0.2


def test_requests_that_are_never_answered_are_given_up_and_told():
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, chunk("a"), 60.0)

    async def run() -> list[RequestRecord]:
        records: list[RequestRecord] = []
        async with answering(handler) as url, open_session(url) as session:
            await open_loop(session, [(0.0, BODY)], records, patience=0.3)
            await closed_loop(session, iter([BODY] * 9), records, concurrency=2, seconds=0.1, patience=0.2)
        return records

    assert [r.outcome for r in asyncio.run(run())] == [LoadOutcome.UNFINISHED] * 3


def test_a_closed_loop_keeps_as_many_under_way_as_it_is_told():
    under_way = most = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return await stream(request, chunk("a", "length"), "[DONE]")

    async def run() -> list[RequestRecord]:
        records: list[RequestRecord] = []
        async with answering(handler) as url, open_session(url) as session:
            await closed_loop(session, iter([BODY] * 12), records, concurrency=3, seconds=30)
        return records

    assert len(asyncio.run(run())) == 12
    assert most == 3
