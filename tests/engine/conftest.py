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
def clock() -> Clock:
    """Simulated time, for a fake engine."""
    return Clock()
