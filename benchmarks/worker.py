"""An engine in a process group of its own that communicates in lines of JSON. It is stopped (SIGSTOP) while another is
measured, so that no idle thread of it spins on a core. Standard library only: the worker's side runs in the peers'
environments too."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Answer = dict[str, Any]


class WorkerError(RuntimeError):
    """A worker ended or reported an error."""


class Worker:
    """Starts `python -m module ...`, waits for its first line (its description), and stops it until it is asked
    something.

    `environment` is added to this process's; `patience` is the most seconds that an answer may take, also the first
    line.
    """

    def __init__(self, python: str, module: str, *args: str, environment: Mapping[str, str] | None = None, patience: float = 900) -> None:
        # On disk, not a pipe: it is read only if the worker fails, and a full pipe would block it.
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - open as long as the worker
        self._patience = patience
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-m", module, *args],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # a group: some engines start processes of their own
        )
        self.name = module
        self.pid = self._process.pid
        try:
            self.about = self._read()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, **question: Any) -> Answer:
        """One answer; the worker runs only until it has given it. Raises `WorkerError` with the end of the worker's
        output."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._read()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)  # also ends stopped processes
        self._process.wait()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        # A worker prints a line and waits: nothing is left in the buffer when it is asked again.
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            raise WorkerError(f"{self.name}: no answer within {self._patience:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._process.wait(timeout=10)
        self._log.seek(0)
        return f"{self.name} ended early:\n" + "".join(self._log.readlines()[-15:])


def serve(start: Callable[[], tuple[Answer, Callable[[Answer], Answer]]]) -> None:
    """The worker's side: starts the engine, prints its description, then answers questions until the parent closes the
    pipe."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not disturb the protocol

    def say(answer: Answer) -> None:
        print(json.dumps(answer), file=out, flush=True)

    try:
        about, answer = start()
        say(about)
        for line in sys.stdin:
            say(answer(json.loads(line)))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
