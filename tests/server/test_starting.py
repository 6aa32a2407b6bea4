"""From its first moment a server answers: it is alive, it is not ready, and what it is doing."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import server
from jaxinfer.start_progress import StartProgress

ROOT = Path(server.__file__).parent.parent

# `jaxinfer serve` itself, over an engine whose start lasts until a file is there.
SCRIPT = """
import pathlib, sys, time, types
from tests.server.scripted_engine import ScriptedEngine

def start(config, progress):
    with progress.measured("loading weights", 200, lambda: 80), progress.counted("compiling", 12) as compiled:
        for _ in range(3):
            compiled()
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
    return ScriptedEngine(config)

sys.modules["jaxinfer.engine"] = types.SimpleNamespace(Engine=start)
from server.cli import main
main(["serve", "--port", sys.argv[2], "--served-model-name", "tiny", "--metrics-key-file", sys.argv[3]])
"""
DOING = "loading weights 40%, compiling 3 of 12"


@pytest.fixture
def starting(tmp_path, unused_port):
    keys = tmp_path / "metrics-keys"
    keys.write_text("first\n")
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "go"), str(unused_port), str(keys)]
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with httpx.Client(base_url=f"http://127.0.0.1:{unused_port}", timeout=60) as client:
        yield process, client, tmp_path / "go"
    process.kill()
    process.stderr.close()
    process.wait()


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def until(seconds, answer):
    """The first answer for which the server is there."""
    for _ in range(int(seconds / 0.02)):
        try:
            return answer()
        except httpx.ConnectError:
            time.sleep(0.02)
    raise AssertionError("nothing listens")


def test_a_server_answers_while_it_starts_and_serves_once_it_is_ready(starting, tmp_path):
    process, client, go = starting

    def metrics(key):
        return client.get("/metrics", headers={"Authorization": f"Bearer {key}"} if key else {}).status_code

    alive = until(30, lambda: client.get("/health"))
    assert (alive.status_code, alive.json()["status"]) == (200, "starting")
    while (ready := client.get("/ready")).json().get("doing") != DOING:
        assert ready.status_code == 503
        time.sleep(0.02)
    assert (ready.status_code, ready.json()) == (503, {"status": "starting", "doing": DOING})
    for refused in (client.get("/v1/models"), client.post("/v1/chat/completions", json={"model": "tiny", "messages": []})):
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"] == {
            "message": f"the server is starting ({DOING}): try again in a few seconds",
            "type": "server_error",
            "param": None,
            "code": "starting",
        }
    assert "<title>jaxinfer</title>" in client.get("/").text
    assert client.get("/static/main.js").status_code == 200
    assert client.get("/static/nothing.js").status_code == 404
    os.kill(process.pid, signal.SIGHUP)
    assert client.get("/health").status_code == 200
    go.touch()
    while client.get("/ready").status_code != 200:
        time.sleep(0.02)
    assert client.get("/health").json() == {"status": "ok"}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert [metrics(key) for key in (None, "second", "first")] == [401, 401, 200]
    (tmp_path / "metrics-keys").write_text("second\n")
    os.kill(process.pid, signal.SIGHUP)
    while metrics("second") != 200:
        time.sleep(0.02)
    assert metrics("first") == 401
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 0


def test_a_server_told_to_end_while_it_starts_ends_at_once(starting):
    process, client, _ = starting
    until(30, lambda: client.get("/health"))
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 0
    assert "Traceback" not in process.stderr.read()


def test_progress_names_what_is_under_way_and_how_far_it_is():
    progress = StartProgress("importing libraries")
    assert progress.describe() == "importing libraries"
    with progress.measured("loading weights", 1000, lambda: 1234), progress.counted("compiling", 2) as compiled:
        compiled()
        assert progress.describe() == "loading weights 100%, compiling 1 of 2"
    progress.note("measuring")
    assert progress.describe() == "measuring"
    with progress.measured("making weights", 0, lambda: 0):
        assert progress.describe() == "making weights"
