"""A server as a process of its own on a free port, `jaxinfer serve` by default, and its metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.worker import ROOT

START_TIMEOUT = 600.0  # seconds to load and compile
OURS = (sys.executable, "-m", "server.cli", "serve")
STOP_TIMEOUT = 30.0  # seconds to end after SIGTERM


class ServerError(RuntimeError):
    """A server that doesn't start, or doesn't answer."""


class Server:
    """Entering starts it, leaving stops it; `url` is its address. The port is free when it is chosen.

    `command` is another server's, which must accept --host and --port; `ready_path` answers 200 when it is ready.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        command: Sequence[str] = OURS,
        ready_path: str = "/ready",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # The log goes to a file, not a pipe: it is read only if the server fails, and a full pipe would block it.
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - open as long as the server
        self._ready_path = ready_path
        self._process = subprocess.Popen(
            [*command, *flags, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group: some servers start processes of their own
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while not self._is_ready():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"the server did not become ready:\n{self.last_words()}")
                time.sleep(0.2)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def pause(self) -> None:
        """Stops it (SIGSTOP), so that no thread of it spins on a core while another is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> int | None:
        """Sends SIGTERM; returns the exit status, or None where it doesn't end in time."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> list[str]:
        """The lines so far."""
        self._log.seek(0)
        return self._log.read().splitlines()

    def last_words(self, lines: int = 15) -> str:
        return "\n".join(self.log()[-lines:])

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready_path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def served_model(url: str) -> tuple[str, int | None]:
    """The first model's name and its context in tokens, None where the server doesn't report it. Raises
    `ServerError`."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"} if os.environ.get("OPENAI_API_KEY") else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30) as answer:
            model: dict[str, Any] = json.load(answer)["data"][0]
    except (OSError, ValueError, LookupError) as error:
        raise ServerError(
            f"{url}/v1/models doesn't tell what is served ({error}): give the address of an OpenAI-compatible server"
        ) from error
    return model["id"], model.get("max_model_len")


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text -> value by name and labels, such as `jaxinfer_kv_pages_used{mesh="decode"}`."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {s.name + ("{" + ",".join(f'{k}="{v}"' for k, v in s.labels.items()) + "}" if s.labels else ""): s.value for s in samples}
