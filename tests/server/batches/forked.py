"""What the processes of forks.py run."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import NoReturn

import server.graceful
import server.openai.app  # noqa: F401 (so that the forks need not import it)
from server.batches.batch_store import BatchStore
from server.cli import main as jaxinfer
from tests.server.batches.life import live_one_batch
from tests.server.scripted_engine import ScriptedEngine


class Paced(ScriptedEngine):
    """Writes as many letters as a request asks for, one a millisecond."""

    def __init__(self, config: object, progress: object = None) -> None:
        super().__init__(config, batch_size=8)

    def step(self) -> object:
        time.sleep(0.001)
        return super().step()


def serve(folder: str, log: str) -> NoReturn:
    """`jaxinfer serve` itself."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    jaxinfer(["serve", "--port", "0", "--served-model-name", "tiny", "--batch-dir", folder])


def live(folder: str, acknowledged: str, run: int, crash_at: int, end: str) -> None:
    """Take one batch from its upload, or from where an earlier process left it, to its end, and be killed before the store's
    `crash_at`th step: a commit, a file's writing, renaming or removal. What `keep` has acknowledged is noted in a file."""
    countdown = _Countdown(crash_at)
    for name in ("fsync", "unlink", "replace"):
        setattr(os, name, countdown.before(getattr(os, name)))
    connect = sqlite3.connect

    def connect_counted(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda sql: countdown.step() if sql == "COMMIT" else None)
        return connection

    sqlite3.connect = connect_counted
    store = BatchStore(Path(folder))
    with open(acknowledged, "a", buffering=1) as noted:
        live_one_batch(store, str(run), end, noted.write)
    store.close()


class _Countdown:
    def __init__(self, steps: int) -> None:
        self._num_left, self._lock = steps, threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                os.kill(os.getpid(), SIGKILL)

    def before(self, function: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            self.step()
            return function(*arguments, **options)

        return counted


def main() -> None:
    """Read commands, a line each: fork, or wait for a fork's end; the answer is a number."""
    sys.modules["jaxinfer.engine"] = types.SimpleNamespace(Engine=Paced)
    importlib.import_module("server.local_backend")  # with this engine, and before the forks, each of which would take seconds for it
    for line in sys.stdin:
        job, *arguments = json.loads(line)
        if job == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(arguments[0], 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            try:
                {"serve": serve, "live": live}[job](*arguments)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)


if __name__ == "__main__":
    main()
