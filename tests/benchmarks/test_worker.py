from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.worker import Worker, WorkerError

MODULE = "tests.benchmarks.counting_worker"


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(sys.executable, MODULE)
    yield worker
    worker.close()


def state(worker: Worker) -> str:
    return Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_answers_in_order_whatever_its_libraries_print(worker: Worker) -> None:
    assert worker.about == {"name": "counter"}
    assert [worker.ask(seed=n) for n in (7, 8)] == [{"asked": 1, "question": {"seed": 7}}, {"asked": 2, "question": {"seed": 8}}]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads a process's state from /proc")
def test_a_worker_that_is_not_asked_is_stopped(worker: Worker) -> None:
    for _ in range(2):
        deadline = time.monotonic() + 5
        while state(worker) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(worker) == "T"
        worker.ask()


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(WorkerError, match="no such model"):
        Worker(sys.executable, MODULE, "broken")


def test_a_worker_that_ends_early_leaves_its_last_words(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="gone"):
        worker.ask(exit=True)
