"""A router with workers as processes on this machine, each on cores of its own."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from benchmarks.serving import START_TIMEOUT, Server, ServerError
from benchmarks.worker import ROOT

ROUTER = (sys.executable, "-m", "server.cli", "router")


class WorkerCluster:
    """Entering starts routers and then their workers; leaving ends all. `workers`: role and core of each; `flags`: of
    every worker; `routers`: the flags of each."""

    def __init__(self, workers: Sequence[tuple[str, int]], flags: Sequence[str], routers: Sequence[Sequence[str]] = ((),)) -> None:
        self._workers, self._flags, self._router_flags = workers, flags, routers
        self._opened = ExitStack()
        self._routers: list[Server] = []
        self._ports: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {"JAXINFER_WORKER_TOKEN": secrets.token_hex(16)}

    def __enter__(self) -> Self:
        try:
            model = [flag for flag in self._flags if flag.startswith("--model=")]
            for flags in self._router_flags:
                self._ports.append(free_port())
                router = Server(
                    ["--workers-port", str(self._ports[-1]), *model, *flags],
                    command=ROUTER,
                    ready_path="/health",
                    environment=self._environment,
                )
                self._routers.append(self._opened.enter_context(router))
            for role, core in self._workers:
                self._start(role, core)
                # One by one: what the first compiles the next finds.
                self._wait(lambda: self.num_workers() == len(self._processes))
            self._wait(self._is_ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self._opened.close()

    @property
    def urls(self) -> list[str]:
        """One a router."""
        return [router.url for router in self._routers]

    def pause(self) -> None:
        """Stop the workers; the router, which does nothing without requests, goes on."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the workers go on; returns once the router has them again."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        time.sleep(1.0)  # what they say of before may come first
        self._wait(lambda: self.num_workers() == len(self._processes))

    def num_workers(self) -> int:
        """That the last router knows."""
        log = "\n".join(self._routers[-1].log())
        return log.count("is here") - log.count("is gone")

    def _start(self, role: str, core: int) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the cluster
        self._opened.callback(log.close)
        routers = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        command = [sys.executable, "-m", "server.cli", "worker", "--role", role, "--router", routers, *self._flags]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | self._environment, stdout=log, stderr=log)
        os.sched_setaffinity(process.pid, {core})  # long before it counts its cores
        self._processes.append(process)

    def _wait(self, is_done: Any) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not is_done():
            if any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                raise ServerError(f"the workers did not become ready:\n{self._routers[-1].last_words()}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        with suppress(urllib.error.URLError), urllib.request.urlopen(f"{self.urls[-1]}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
