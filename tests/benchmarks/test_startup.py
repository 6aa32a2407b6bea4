"""A folder is written, read past the cache, and loaded by a process that says how long it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import startup
from tests.conftest import QUICK_COMPILATION


def test_a_folders_weights_are_loaded_by_a_process(tiny_model_path: Path) -> None:
    (file,) = tiny_model_path.glob("*.safetensors")
    assert startup.disk_rate(file) > 0
    startup.drop_from_cache(tiny_model_path)
    measured = startup.run(startup._LOAD, str(tiny_model_path), "packed", **QUICK_COMPILATION)
    assert measured["seconds"] > 0 and measured["beside"] > 0


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="no such thing"):
        startup.run("raise SystemExit('no such thing')")
