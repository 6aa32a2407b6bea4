"""SIGTERM: requests under way finish, new ones are turned away, and the process exits 0."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import server

pytestmark = pytest.mark.processes

ROOT = Path(server.__file__).parent.parent

# `jaxinfer serve` itself, over an engine that takes a twentieth of a second a token.
SCRIPT = """
import sys, time, types
from tests.server.scripted_engine import ScriptedEngine

class Slow(ScriptedEngine):
    def step(self):
        time.sleep(0.05)
        return super().step()

sys.modules["jaxinfer.engine"] = types.SimpleNamespace(Engine=Slow)
from server.cli import main
main(["serve", "--port", "0", "--served-model-name", "tiny", "--shutdown-timeout", *sys.argv[1:]])
"""
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 15, "stream": True}


@pytest.fixture
def serve():
    processes = []

    def serve(patience, *flags):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(patience), *map(str, flags)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        for line in process.stderr:
            if " is ready on " in line:
                return process, line.split()[-1]
        raise AssertionError("the server ended before it was ready")

    yield serve
    for process in processes:
        process.kill()
        process.stderr.close()
        process.wait()


def test_a_running_stream_finishes_and_new_requests_are_turned_away(serve):
    process, url = serve(20)
    with httpx.Client(base_url=url) as client, client.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        os.kill(process.pid, signal.SIGTERM)
        with httpx.Client(base_url=url) as other:
            while other.get("/ready").status_code == 200:
                pass
            refused = other.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
            assert other.get("/health").status_code == 200
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in (first, *rest[:-1])]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcdefghabcdefg"
    assert process.wait(10) == 0


def test_what_does_not_finish_in_time_is_aborted(serve):
    process, url = serve(0.3)
    with httpx.Client(base_url=url) as client, client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 400}) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(process.pid, signal.SIGTERM)
        error = json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("the server is shutting down", "service_unavailable")
    assert process.wait(3) == 0
    assert "Traceback" not in process.stderr.read()


def test_the_usage_log_is_complete_when_the_process_ends(serve, tmp_path):
    log = tmp_path / "usage.jsonl"
    process, url = serve(1.0, "--usage-log", log)
    with httpx.Client(base_url=url) as client:
        answer = client.post("/v1/completions", json=BODY | {"max_tokens": 5, "stream": False})
        with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 400}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGTERM)
            list(lines)
    assert process.wait(3) == 0
    finished, cut = [json.loads(line) for line in log.read_text().splitlines()]
    assert (finished["outcome"], finished["output_tokens"], finished["finish_reasons"]) == ("finished", 5, ["length"])
    assert finished["id"] == answer.json()["id"]
    assert (cut["outcome"], cut["finish_reasons"]) == ("aborted", [None])
    assert 0 < cut["output_tokens"] < 400


def test_an_idle_server_ends_at_once(serve):
    process, _ = serve(20)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(5) == 0


def test_a_second_signal_ends_at_once_and_quietly(serve, tmp_path):
    log = tmp_path / "usage.jsonl"
    process, url = serve(60, "--usage-log", log, "--log-level", "warning")
    with httpx.Client(base_url=url) as client, ExitStack() as streams:
        client.post("/v1/completions", json=BODY | {"max_tokens": 1, "stream": False}).raise_for_status()
        for _ in range(2):
            stream = streams.enter_context(client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 400}))
            assert stream.status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        while client.get("/ready").status_code == 200:
            pass
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
    waiting, cut = process.stderr.read().splitlines()  # no traceback
    assert waiting.endswith("shutting down: waiting up to 60 s for 2 requests")
    assert cut.endswith("second signal: exiting at once, 2 requests are cut off")
    assert [json.loads(line)["outcome"] for line in log.read_text().splitlines()] == ["finished"]
