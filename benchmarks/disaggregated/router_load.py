"""The router's own time: requests at a rate, before workers that answer at once; and its memory over many of them."""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import aiohttp
import psutil

from benchmarks.disaggregated.cluster import ROUTER, free_port
from benchmarks.serving import Server, served_model
from benchmarks.worker import ROOT


@dataclass(frozen=True)
class RouterLatency:
    """Milliseconds from sending a request to its first token, of a router in front of fake workers."""

    rate: float  # requests a second that were asked for
    achieved: float
    p50: float
    p99: float
    cpu: float  # cores that the router used
    memory: tuple[float, float]  # MiB before and after

    def row(self) -> str:
        before, after = self.memory
        return f"{self.rate:8.0f}{self.achieved:10.0f}{self.p50:9.2f}{self.p99:9.2f}{self.cpu:9.2f}{before:9.0f} ->{after:6.0f} MiB"


HEAD = f"{'asked/s':>8}{'got/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'cores':>9}{'memory':>9}"


async def _measure(url: str, model: str, process: psutil.Process, rate: float, num_requests: int, prompt_tokens: int) -> RouterLatency:
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 31000) for _ in range(prompt_tokens)] for _ in range(64)]
    times: list[float] = []
    before, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
    connector = aiohttp.TCPConnector(limit=0)
    began = time.perf_counter()
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def ask(number: int) -> None:
            body = {"model": model, "prompt": prompts[number % len(prompts)], "max_tokens": 2, "stream": True}
            sent = time.perf_counter()
            async with session.post("/v1/completions", json=body) as answer:
                await answer.content.readany()
                times.append(time.perf_counter() - sent)
                if answer.status != 200:
                    raise RuntimeError(f"the router answered {answer.status}: {await answer.text()}")
                await answer.read()

        # It keeps none that has ended: with 100,000 of them the collector of garbage would stop this process for long.
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_requests):
                await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
                tasks.create_task(ask(number))
    seconds = time.perf_counter() - began
    quantiles = [1e3 * value for value in statistics.quantiles(times, n=100)]
    used = (sum(process.cpu_times()[:2]) - cpu) / seconds
    memory = before / 2**20, process.memory_info().rss / 2**20
    return RouterLatency(rate, num_requests / seconds, quantiles[49], quantiles[98], used, memory)


def measure(rates: list[float], seconds: float, num_requests: int = 0, prompt_tokens: int = 200) -> list[RouterLatency]:
    """One row a rate; `num_requests`: of a last row, at the highest rate, for the memory."""
    port = free_port()
    flags = ["--workers-port", str(port), "--no-access-log"]
    with Server(flags, command=ROUTER, ready_path="/health") as router:
        fakes = [sys.executable, "-m", "benchmarks.disaggregated.fake_worker", "--router", f"127.0.0.1:{port}"]
        with subprocess.Popen(fakes, cwd=ROOT) as workers:
            try:
                while "\n".join(router.log()).count("is here") < 4:
                    time.sleep(0.1)
                process, model = psutil.Process(router.pid), served_model(router.url)[0]
                rows = []
                asyncio.run(_measure(router.url, model, process, 100.0, 300, prompt_tokens))
                for rate, count in [
                    *((rate, round(rate * seconds)) for rate in rates),
                    *([(rates[-1], num_requests)] if num_requests else []),
                ]:
                    rows.append(asyncio.run(_measure(router.url, model, process, rate, count, prompt_tokens)))
            finally:
                workers.kill()
    return rows
