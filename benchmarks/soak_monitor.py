"""Monitors a server once a second: its process and the machine from outside, its metrics from inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from benchmarks.serving import parse_metrics

PERIOD = 1.0  # seconds
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServerSample:
    at: float  # seconds since monitoring began
    rss: float  # MiB
    num_files: int  # open files and sockets
    num_threads: int
    server_cpu: float  # CPU seconds so far
    other_cpu: float  # of all processes but the server and this one, and what a hypervisor took
    waiting: float
    running: float
    pages_used: float  # used by requests, as a share of all, on the fuller mesh
    output_tokens: float  # counters
    prompt_tokens: float
    preemptions: float
    compilations: float

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.pages_used)


class ServerMonitor:
    """`samples` grows while it is entered. When the server doesn't answer in time there is no sample: `num_missed`
    counts it."""

    def __init__(self, session: aiohttp.ClientSession, pid: int) -> None:
        self._session, self._process, self._own = session, psutil.Process(pid), psutil.Process()
        self.start = time.perf_counter()
        self.samples: list[ServerSample] = []
        self.num_missed = 0
        self.metrics: dict[str, float] = {}  # the last ones read, all of them

    def now(self) -> float:
        return time.perf_counter() - self.start

    async def sample(self) -> ServerSample:
        """One sample. Raises the errors of the network or the operating system."""
        async with self._session.get("/metrics", timeout=aiohttp.ClientTimeout(total=30)) as answer:
            self.metrics = parse_metrics(await answer.text())
        with self._process.oneshot():
            sample = ServerSample(
                at=self.now(),
                rss=self._process.memory_info().rss / MIB,
                num_files=self._process.num_fds(),
                num_threads=self._process.num_threads(),
                server_cpu=(server := _cpu_seconds(self._process)),
                other_cpu=_all_cpu_seconds() - server - _cpu_seconds(self._own),
                **_figures(self.metrics),
            )
        self.samples.append(sample)
        return sample

    @asynccontextmanager
    async def monitoring(self) -> AsyncIterator[None]:
        """Sample once a second."""

        async def watch() -> None:
            while True:
                began = time.perf_counter()
                try:
                    await self.sample()
                except (aiohttp.ClientError, TimeoutError):
                    self.num_missed += 1
                await asyncio.sleep(max(began + PERIOD - time.perf_counter(), 0))

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def until_idle(self, patience: float) -> ServerSample:
        """Samples until the server has no request and no page in use, or patience ends; returns the last sample."""
        deadline = time.perf_counter() + patience
        while True:
            sample = await self.sample()
            if sample.is_idle or time.perf_counter() > deadline:
                return sample
            await asyncio.sleep(0.2)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _all_cpu_seconds() -> float:
    times = psutil.cpu_times()
    return float(
        sum(times[:]) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    )


def _figures(metrics: dict[str, float]) -> dict[str, Any]:
    meshes = ("prefill", "decode")
    shares = [metrics[f'jaxinfer_kv_pages_used{{mesh="{m}"}}'] / metrics[f'jaxinfer_kv_pages{{mesh="{m}"}}'] for m in meshes]
    return {
        "waiting": metrics["jaxinfer_requests_waiting"],
        "running": metrics["jaxinfer_requests_prefilling"] + metrics["jaxinfer_requests_running"],
        "pages_used": max(shares),
        "output_tokens": metrics["jaxinfer_output_tokens_total"],
        "prompt_tokens": metrics["jaxinfer_prompt_tokens_total"],
        "preemptions": metrics["jaxinfer_preemptions_total"],
        "compilations": metrics["jaxinfer_compilations_after_ready_total"],
    }
