"""A router and workers as processes on loopback, with the tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx

from server.workers import worker_pb2 as pb
from server.workers import worker_pb2_grpc
from server.workers.credentials import TOKEN_KEY
from tests.conftest import QUICK_COMPILATION, TINY

ROOT = Path(__file__).parents[3]
SECONDS = 120.0  # that anything here may take where the machine is busy
SETTINGS = TINY | {"kv_memory": "2MiB", "max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (128,), "prefill_chunk_size": 64}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """`folder`: for logs; `flags`: of every process. Workers have names; a name may be started again once its process has ended."""

    def __init__(self, model: Path, folder: Path, token: str = "known to all", flags: Sequence[str] = ()) -> None:
        self.model, self.folder, self.token = model, folder, token
        self.ports: dict[str, tuple[int, int]] = {}  # of HTTP and of workers, by the router's name
        self._environment = os.environ | QUICK_COMPILATION | {"JAXINFER_WORKER_TOKEN": token, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        self._flags = flags
        self._begun: dict[str, int] = {}  # where its last process's log begins
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The first router's."""
        return self.url_of(next(iter(self.ports)))

    def url_of(self, router: str) -> str:
        return f"http://127.0.0.1:{self.ports[router][0]}"

    def start_router(self, name: str = "router") -> None:
        """Under the ports that it had before, if it had."""
        http, workers = self.ports.setdefault(name, (free_port(), free_port()))
        ports = ("--port", str(http), "--workers-port", str(workers))
        # By expectation such short prompts would never be prefilled apart.
        self._start(name, "router", *ports, "--model", str(self.model), "--prefill-apart", "always", "--no-access-log")

    def start_worker(self, name: str, role: str, **settings: Any) -> None:
        routers = ",".join(f"127.0.0.1:{port}" for _, port in self.ports.values())
        flags = [f"--{key.replace('_', '-')}={_text(value)}" for key, value in (SETTINGS | settings).items()]
        self._start(name, "worker", "--role", role, "--router", routers, "--model", str(self.model), *flags)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / name).open("ab") as log:
            self._begun[name] = log.tell()
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "server.cli", *command, *self._flags], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def log(self, name: str) -> str:
        """Since it was started last."""
        return (self.folder / name).read_bytes()[self._begun[name] :].decode(errors="replace")

    def wait_for(self, name: str, text: str) -> None:
        """Until a process has logged it."""
        deadline = time.monotonic() + SECONDS
        while text not in self.log(name):
            assert time.monotonic() < deadline, self.log(name)
            assert self.processes[name].poll() is None, self.log(name)
            time.sleep(0.05)

    def wait_until_ready(self, router: str = "router") -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url_of(router)}/ready").status_code == 200:
                    return
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, [(name, self.log(name)) for name in self.processes]
            time.sleep(0.05)

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    def loads(self, *names: str) -> list[pb.Load]:
        """What each of these workers has to do, by its own word."""
        found = []
        for name in names:
            address = re.findall(r"is ready on (\S+)", self.log(name))[-1]
            with grpc.insecure_channel(address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                found.append(next(stub.WatchLoad(pb.LoadRequest(), metadata=((TOKEN_KEY, self.token),))))
        return found

    def num_workers(self, router: str = "router") -> int:
        """That this router has, by its log."""
        log = self.log(router)
        return log.count("is here") - log.count("is gone")

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Stream(threading.Thread):
    """One streamed completion, read in a thread. `tokens` grows as they come."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, {"model": "tiny", "stream": True, "return_token_ids": True, "temperature": 0.0, **body}
        self.tokens: list[int] = []
        self.error: object = None
        self.finish_reason: str | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self._events():
                if "error" in event:
                    self.error = event["error"]
                for choice in event.get("choices", ()):
                    self.tokens += choice.get("token_ids") or []
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
        except Exception as error:
            self.error = error

    def _events(self) -> Iterator[dict[str, Any]]:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=SECONDS) as answer:
            if answer.status_code != 200:
                yield {"error": answer.read().decode()}
                return
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    def wait_for(self, num_tokens: int) -> None:
        deadline = time.monotonic() + SECONDS
        while len(self.tokens) < num_tokens and self.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.002)
