"""Processes to be killed, a few milliseconds each: one imports everything, the others are forks of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

ROOT = Path(__file__).parents[3]


class Forks:
    """The parent of the processes. It runs no thread, so that forking is safe whatever the tests themselves have started."""

    def __enter__(self) -> Forks:
        command = [sys.executable, "-m", "tests.server.batches.forked"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)

    def start(self, job: str, *arguments: object) -> int:
        """The process id of one that runs a function of forked.py."""
        return self._ask([job, *arguments])

    def wait(self, pid: int) -> int:
        """How a process ended: its exit status, or the negative number of the signal."""
        return self._ask(["wait", pid])

    def kill(self, pid: int) -> None:
        os.kill(pid, SIGKILL)
        assert self.wait(pid) == -SIGKILL

    def _ask(self, command: list[object]) -> int:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())
