"""Two real processes with JAX over both, and without a model: one is killed or stopped, and the other ends in words, never by an abort."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxinfer.multi_process.peer_failure import PROCESS_LOST
from tests.multi_process.test_two_processes import ROOT, free_port

pytestmark = pytest.mark.processes

SECONDS = 60  # that anything here may take where the machine is busy
HEARTBEAT = 2.0


class Pair:
    def __init__(self, folder: Path) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.logs = [folder / f"log-{number}" for number in (0, 1)]
        self.processes = []
        for number, log in enumerate(self.logs):
            command = [sys.executable, "-m", "tests.multi_process.pair", str(number), address, str(HEARTBEAT)]
            with log.open("wb") as written:
                self.processes.append(subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=written))
        deadline = time.monotonic() + SECONDS
        while not all("met" in self.log(number) for number in (0, 1)):
            assert time.monotonic() < deadline, [self.log(0), self.log(1)]
            time.sleep(0.05)

    def log(self, number: int) -> str:
        return self.logs[number].read_text(errors="replace")

    def check_end(self, number: int, words: str) -> None:
        """It ends by itself, with one line that has these words."""
        assert self.processes[number].wait(SECONDS) == PROCESS_LOST, self.log(number)
        told = [line for line in self.log(number).splitlines() if line != f"met {number}" and "[Gloo]" not in line]
        assert len(told) == 1 and words in told[0] and "start all of them again; this process ends too" in told[0], told


@pytest.fixture
def pair(tmp_path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_killed_leader_leaves_a_follower_that_ends_in_words(pair):
    pair.processes[0].kill()
    pair.check_end(1, "is gone")


def test_who_pauses_for_less_than_the_heartbeat_goes_on_and_for_longer_ends_all_in_words(pair):
    follower = pair.processes[1]
    follower.send_signal(signal.SIGSTOP)
    time.sleep(0.7 * HEARTBEAT)
    follower.send_signal(signal.SIGCONT)
    time.sleep(HEARTBEAT)
    assert pair.processes[0].poll() is None and follower.poll() is None
    follower.send_signal(signal.SIGSTOP)
    pair.check_end(0, "process 1 of 2")
    follower.send_signal(signal.SIGCONT)
    pair.check_end(1, "process 0")
