"""Every example runs as it stands, with the default model, and stays short enough to be read at a glance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK_COMPILATION

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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40
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
