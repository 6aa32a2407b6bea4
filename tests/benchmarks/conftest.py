"""Benchmarks run to their end here; what they measure is nobody's figure."""

from __future__ import annotations

import pytest

from tests.conftest import QUICK_COMPILATION


@pytest.fixture(autouse=True)
def _processes_compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK_COMPILATION.items():
        monkeypatch.setenv(name, value)
