from __future__ import annotations

import pytest

from tests.conftest import MakeLLM
from tests.engine import workload
from tests.engine.simulated import Clock


@pytest.fixture(scope="session")
def expected(llms: MakeLLM) -> list[list[list[int]]]:
    """The workload's tokens, each request alone on one device."""
    return workload.alone(llms(), *workload.workload())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Simulated time, and the engine's own."""
    simulated = Clock()
    monkeypatch.setattr("jaxinfer.engine.time", simulated)
    return simulated
