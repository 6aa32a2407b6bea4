"""Real signals, a real fork and a real end of the interpreter, in the midst of generating."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK_COMPILATION

pytestmark = pytest.mark.processes

ROUNDS = 20


def test_a_process_survives_ctrl_c_at_any_moment_and_a_fork_and_ends_cleanly(tiny_model_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.interrupted_process", str(tiny_model_path), str(ROUNDS), "24"],
        cwd=Path(__file__).parents[2],
        env=os.environ | QUICK_COMPILATION,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:3] == [f"interrupted {ROUNDS}", "child 0", "ends"], done.stdout
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
