"""Every example runs as it stands, with the default model, and stays short enough to be read at a glance."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.llm import LLM
from tests.conftest import QUICK_COMPILATION, TINY

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What its output must hold: words the default model or the example is known to print.
EXPECTED = {
    "async_llm.py": "'The capital of France is' -> ' Paris.",
    "chat.py": "model: ",
    "fastapi_app.py": "/stream  Paris.",
    "offline_batch.py": "'The capital of France is' -> ' Paris.",
    "openai_client.py": "' Paris.",
    "research_logprobs.py": "decode pages in use at the end: 0",
    "streaming.py": "left after 5 tokens; aborted: 1",
    "two_meshes.py": "compiled after ready: 0",
}
# These start an engine that no other test has, on two devices or as a command: `make test` gives them a tiny model, `make test-exhaustive` none,
# and each is a process, as for who tries it. So that the rest don't each read the weights and warm up again, they are given one engine.
LONG = ("chat.py", "async_llm.py", "research_logprobs.py")  # ten seconds each, of calls that others have too
PROCESSES = [path for path in EXAMPLES if path.name in ("openai_client.py", "two_meshes.py")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("example", PROCESSES, ids=lambda path: path.name)
def test_an_example_runs_as_a_process(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, example],
        cwd=ROOT,
        env=os.environ | QUICK_COMPILATION,  # that the default model's programs are right is for others to say, as test_default_model.py
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert EXPECTED[example.name] in done.stdout, done.stdout


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.name, marks=pytest.mark.exhaustive if path.name in LONG else ())
        for path in EXAMPLES
        if path not in PROCESSES
    ],
)
def test_an_example_runs(example: Path, default_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = default_llm.engine
    engine.stats.finished.clear()
    monkeypatch.setattr("jaxinfer.llm.Engine", lambda config: engine)
    monkeypatch.setattr(engine, "close", lambda: None)  # it is other tests' too
    monkeypatch.setattr(sys, "argv", [str(example)])
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert EXPECTED[example.name] in printed, printed


def test_two_meshes_with_a_tiny_model(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def tiny(model: str, cpu_devices: int, **settings: Any) -> LLM:
        assert (model, cpu_devices) == ("default", 2)  # of which this process has more already
        return LLM(str(tiny_model_path), **TINY | settings)

    monkeypatch.setattr("jaxinfer.LLM", tiny)
    runpy.run_path(str(ROOT / "examples" / "two_meshes.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert EXPECTED["two_meshes.py"] in printed and "pages moved between them: 0" not in printed, printed


def test_the_openai_client_with_a_tiny_model(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    popen = subprocess.Popen
    flags = [
        "--model",
        str(tiny_model_path),
        "--kv-memory",
        "1MiB",
        "--max-batch-size",
        "8",
        "--decode-buckets",
        "8",
        "--prefill-buckets",
        "512",
    ]

    def serve(command: list[str]) -> subprocess.Popen[bytes]:
        assert command[:4] == [sys.executable, "-m", "server.cli", "serve"]
        return popen([*command, *flags], cwd=ROOT, env=os.environ | QUICK_COMPILATION)

    monkeypatch.setattr(subprocess, "Popen", serve)
    runpy.run_path(str(ROOT / "examples" / "openai_client.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "completion_tokens=" in printed and "token_logprobs=[" in printed, printed
