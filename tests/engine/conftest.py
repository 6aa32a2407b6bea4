from __future__ import annotations

import pytest

from jaxinfer.llm import LLM
from tests.engine import workload


@pytest.fixture(scope="session")
def expected(llm: LLM) -> list[list[list[int]]]:
    """The workload's tokens, each request alone on one device."""
    return workload.alone(llm, *workload.workload())
