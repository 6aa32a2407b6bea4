"""`jaxinfer batch`: the answers are those of HTTP, and a batch that was cut off goes on where it ended."""

import asyncio
import json

import pytest

from server.backend import Unavailable
from server.batches.offline import BatchFileError, BatchStopped, check_files, run_batch
from server.openai.service import Service
from tests.server.batches.conftest import NO_UNICODE, TEXTS
from tests.server.fakes import ANSWER

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Say"}


def line(custom_id, url="/v1/completions", body=TEXT, method="POST"):
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


@pytest.fixture
def run(backend, tokenizer, config, tmp_path):
    service = Service(backend, tokenizer, config, created=0)

    def run(*lines, concurrency=4):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        done = []
        result = asyncio.run(run_batch(service, source, target, concurrency=concurrency, advance=done.append))
        assert sum(done) == check_files(source, target)
        return result, [json.loads(answer) for answer in target.read_text(encoding="utf-8").splitlines()]

    return run


def test_answers_are_those_of_http(run, client):
    urls = {"a": "/v1/chat/completions", "b": "/v1/completions", "c": "/v1/completions", "d": "/v1/completions", "e": "/v1/embeddings"}
    bodies = {"a": CHAT, "b": TEXT, "c": TEXT | {"n": 0}, "d": {"model": "x", "prompt": "y"}, "e": TEXTS | {"truncate_prompt_tokens": 3}}
    _, answers = run(*[line(name, urls[name], bodies[name]) for name in urls])
    assert {answer["custom_id"] for answer in answers} == set(urls)
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        over_http = client.post(urls[answer["custom_id"]], json=bodies[answer["custom_id"]])
        assert answer["response"]["status_code"] == over_http.status_code
        assert answer["response"]["request_id"]
        assert without_ids(answer["response"]["body"]) == without_ids(over_http.json())


def test_a_line_that_is_no_unicode_fails_alone_and_is_not_asked_again(run):
    for num_answered in (len(NO_UNICODE) + 1, 0):
        result, answers = run(*NO_UNICODE, line("last"))
        failed = {answer["custom_id"]: answer["error"]["code"] for answer in answers if answer["error"]}
        assert failed == {json.loads(text)["custom_id"]: "invalid_unicode" for text in NO_UNICODE}
        assert [answer["custom_id"] for answer in answers if answer["response"]] == ["last"]
        assert result.num_answered == num_answered


def without_ids(body):
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def test_a_bad_line_gets_an_error_line_and_the_rest_goes_on(run):
    bad = {
        "not JSON": ("invalid_json", None),
        "[]": ("invalid_type", None),
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions"}): ("missing_required_parameter", "a"),
        json.dumps({"method": "POST", "url": "/v1/completions", "body": {}}): ("missing_required_parameter", None),
        line("b", method="GET"): ("invalid_value", "b"),
        line(3): ("invalid_type", None),
        line("ok", body=TEXT | {"max_tokens": 1}): ("duplicate_custom_id", "ok"),
    }
    result, answers = run(line("ok"), "", *bad, line("last"))
    errors = [(answer["error"]["code"], answer["custom_id"]) for answer in answers if answer["error"]]
    assert sorted(errors, key=str) == sorted(bad.values(), key=str)
    assert {answer["custom_id"] for answer in answers if answer["response"]} == {"ok", "last"}
    assert (result.num_answered, result.num_failed) == (9, 7)
    assert len({answer["id"] for answer in answers}) == 9


def test_unknown_urls_and_streams_are_refused(run):
    _, answers = run(line("a", url="/v1/images"), line("b", body=TEXT | {"stream": True}))
    found = {answer["custom_id"]: (answer["response"]["status_code"], answer["response"]["body"]["error"]["param"]) for answer in answers}
    assert found == {"a": (404, "url"), "b": (400, "stream")}


def test_lines_already_answered_are_kept_and_not_asked_again(run, backend):
    lines = [line(str(n)) for n in range(5)] + ["bad", line("0")]
    run(*lines[:3], *lines[5:])
    backend.seen.clear()
    result, answers = run(*lines[:3], *lines[5:], *lines[3:5])
    assert (result.num_kept, result.num_answered) == (5, 2)
    assert len(backend.seen) == 2
    assert len(answers) == 7
    result, again = run(*lines[:3], *lines[5:], *lines[3:5])
    assert (result.num_kept, result.num_answered) == (7, 0)
    assert again == answers


def test_a_torn_last_line_is_done_again(run, backend, tmp_path):
    lines = [line(str(n)) for n in range(4)]
    _, answers = run(*lines, concurrency=1)
    target = tmp_path / "out.jsonl"
    whole = target.read_bytes()
    ends = [n for n, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (ends[-1], ends[-1] - 10, ends[-2] + 2, ends[-2] + 1):
        target.write_bytes(whole[:cut])
        backend.seen.clear()
        result, again = run(*lines, concurrency=1)
        assert (result.num_kept, len(backend.seen)) == (3, 1)
        assert [answer["custom_id"] for answer in again] == ["0", "1", "2", "3"]
        assert again[:3] == answers[:3]


@pytest.mark.parametrize("contents", ["my diary\n", '{"a": 1}\n', "[]\n", '{"id": 1, "custom_id": "a", "respo\n{}\n'])
def test_a_file_that_holds_something_else_is_left_alone(run, tmp_path, contents):
    target = tmp_path / "out.jsonl"
    target.write_text(contents)
    with pytest.raises(BatchFileError, match="no batch answer, at byte 0"):
        run(line("a"))
    assert target.read_text() == contents


def test_the_input_is_never_the_output(backend, tokenizer, config, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a") + "\n")
    with pytest.raises(BatchFileError, match="both input and output"):
        asyncio.run(run_batch(Service(backend, tokenizer, config, created=0), source, source, concurrency=1))


def test_when_the_engine_fails_what_was_answered_stays_and_the_rest_can_follow(run, backend, tmp_path):
    lines = [line(str(n)) for n in range(6)]
    run(*lines[:2])
    backend.error, backend.hold_after = Unavailable("the engine failed"), 3
    with pytest.raises(BatchStopped, match="the engine failed"):
        run(*lines)
    assert backend.num_open == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    backend.error = None
    result, answers = run(*lines)
    assert (result.num_kept, result.num_answered, result.num_failed) == (2, 4, 0)
    assert sorted(answer["custom_id"] for answer in answers) == [str(n) for n in range(6)]


def test_a_full_queue_is_waited_for(run, backend, monkeypatch):
    naps = []

    async def nap(seconds):
        naps.append(seconds)
        backend.is_full = False

    real = asyncio.sleep
    backend.is_full = True
    monkeypatch.setattr("server.batches.lines.asyncio.sleep", lambda seconds: nap(seconds) if seconds else real(0))
    result, [answer] = run(line("a"))
    assert naps == [1.0]
    assert answer["response"]["body"]["choices"][0]["text"].startswith(ANSWER[:5])
    assert result.num_failed == 0


def test_requests_run_at_once_up_to_the_concurrency(run, backend):
    most = 0
    generate = backend.generate

    def watched(*arguments):
        nonlocal most
        most = max(most, backend.num_open + 1)
        return generate(*arguments)

    backend.generate = watched
    run(*[line(str(n)) for n in range(20)], concurrency=5)
    assert most == 5
