"""`python -m benchmarks.hostile`: requests of one client that could block a server, and their effect on another
client's stream.

Each attack is sent again and again while a stream is read and /health is asked every 20 ms. Before each attack comes an
equally long time without one: the longest gap grows with the time of observation. It starts `jaxinfer serve`, or uses
--url (then memory needs --pid).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil

from benchmarks.http_load import LoadOutcome, LoadRequest, open_session, send
from benchmarks.serving import Server, served_model

CHAT, COMPLETIONS, FILES = "/v1/chat/completions", "/v1/completions", "/v1/files"
HEALTH_PERIOD = 0.02  # seconds
WARM_UP = 5.0  # seconds
STREAM_TOKENS = 64
MIB = 2**20


@dataclass(frozen=True, slots=True)
class AttackImpact:
    """What the other client saw during an attack. Times in milliseconds."""

    attack: str
    typical_gap: float  # between two tokens, the median
    longest_gap: float
    longest_health: float
    memory: float  # MiB, right after the attack
    statuses: dict[str, int]  # status codes of the attack's answers

    def row(self) -> str:
        statuses = ", ".join(f"{count} x {status}" for status, count in self.statuses.items()) or "none"
        return f"{self.attack:34}{self.typical_gap:8.1f}{self.longest_gap:9.1f}{self.longest_health:9.1f}{self.memory:9.0f}  {statuses}"


def attacks(model: str) -> dict[str, Callable[[], tuple[str, bytes]]]:
    """By name a function that builds a path and a body: it runs in the attacker's process, because bodies are large."""

    def chat(**change: Any) -> tuple[str, bytes]:
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        return CHAT, json.dumps(body | change).encode()

    def text(num_bytes: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": ("hello world, " * (num_bytes // 13 + 1))[:num_bytes]}]

    def completion(prompt: object) -> tuple[str, bytes]:
        return COMPLETIONS, json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode()

    return {
        "a text of 500 KB": lambda: chat(messages=text(500_000)),
        "a text of 3.9 MB": lambda: chat(messages=text(3_900_000)),
        "a text of 30 MB": lambda: chat(messages=text(30_000_000)),
        "a text of 3.9 MB, half of it escapes": lambda: completion("\n," * 1_300_000),
        "a million stop strings": lambda: chat(stop=["a"] * 1_000_000),
        "a million keys for the template": lambda: chat(chat_template_kwargs={str(n): 1 for n in range(1_000_000)}),
        "a million unknown keys": lambda: chat(**{f"k{n}": 1 for n in range(1_000_000)}),
        "300,000 unknown keys": lambda: chat(**{f"k{n}": 1 for n in range(300_000)}),
        "a key of 3.9 MB": lambda: chat(**{"k" * 3_900_000: 1}),
        "a key of 31 MB": lambda: chat(**{"k" * 31_000_000: 1}),
        "100,000 messages": lambda: chat(messages=text(2) * 100_000),
        "2,000 messages": lambda: chat(messages=text(2) * 2_000),
        "9,000 parts of a message": lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "word "}] * 9_000}]),
        "290,000 token ids, all wrong": lambda: completion([-1] * 290_000),
        "290,000 prompts": lambda: completion(["a"] * 290_000),
        "lists in lists": lambda: (CHAT, b"[" * 2_000_000),
    }


def attack(url: str, model: str, name: str, seconds: float) -> dict[str, int]:
    """Sends an attack again and again; returns how often it had each status. Runs in a process of its own."""
    path, body = attacks(model)[name]()
    statuses: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                statuses[str(answer.status)] += 1
        except urllib.error.HTTPError as error:
            statuses[str(error.code)] += 1
        except OSError:  # refused before all of it was sent
            statuses["closed"] += 1
            time.sleep(0.05)
    return dict(statuses)


async def observe_impact(
    url: str, model: str, name: str, work: Callable[[], asyncio.Future[dict[str, int]]], memory: Callable[[], float]
) -> AttackImpact:
    """Observes a stream and /health until the work is done."""
    working = work()
    gaps: list[float] = []
    health: list[float] = []

    async def read_streams() -> None:
        body = {
            "model": model,
            "prompt": "Once upon a time",
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        async with open_session(url) as session:
            while not working.done():
                record = await send(session, LoadRequest.of(COMPLETIONS, body))
                if record.outcome is not LoadOutcome.ANSWERED:
                    raise RuntimeError(f"the stream that is to be watched ended otherwise: {record.outcome}, {record.message}")
                gaps.extend(1e3 * gap for gap in record.gaps)

    async def ask_health() -> None:
        async with open_session(url) as session:
            while not working.done():
                asked = time.perf_counter()
                async with session.get("/health") as answer:
                    await answer.read()
                health.append(1e3 * (time.perf_counter() - asked))
                await asyncio.sleep(HEALTH_PERIOD)

    await asyncio.gather(read_streams(), ask_health())
    return AttackImpact(name, float(np.median(gaps)), max(gaps), max(health), memory(), await working)


async def run(
    url: str, model: str, names: Sequence[str], seconds: float, memory: Callable[[], float]
) -> tuple[list[AttackImpact], list[AttackImpact]]:
    """The impact without attacks, before each, and during them, for the same time."""
    loop = asyncio.get_running_loop()
    # The attacker shares the server's processor only because one machine runs both.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=os.nice, initargs=(19,)) as attacker:

        def idle(seconds: float) -> asyncio.Future[dict[str, int]]:
            return asyncio.ensure_future(asyncio.sleep(seconds, {}))

        await observe_impact(url, model, "warming up", partial(idle, WARM_UP), memory)
        quiet, beside = list[AttackImpact](), list[AttackImpact]()
        for name in names:
            quiet.append(await observe_impact(url, model, "none", partial(idle, seconds), memory))
            work = partial(loop.run_in_executor, attacker, attack, url, model, name, seconds)
            beside.append(await observe_impact(url, model, name, work, memory))
            print(beside[-1].row(), flush=True)
    return quiet, beside


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 where an attack had more impact than allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="a running server's, instead of starting one")
    parser.add_argument("--pid", type=int, help="its process, for its memory")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each attack (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of all attacks: of each round's longest gaps the median ratio counts (default: 3)"
    )
    parser.add_argument("--only", default="", help="attacks whose names hold this")
    parser.add_argument("--serve", default="", help="flags of the server that is started")
    options = parser.parse_args(arguments)
    if options.url:
        return _judge(options, options.url, options.pid)
    with Server(options.serve.split()) as server:
        return _judge(options, server.url, server.pid)


def _judge(options: argparse.Namespace, url: str, pid: int | None) -> int:
    model, _ = served_model(url)
    process = None if pid is None else psutil.Process(pid)
    names = [name for name in attacks(model) if options.only in name]
    print(f"{'attack':34}{'gap ms':>8}{'longest':>9}{'/health':>9}{'MiB':>9}  answers")
    memory = (lambda: process.memory_info().rss / MIB) if process else lambda: math.nan
    quiet, beside = asyncio.run(run(url, model, names * options.rounds, options.seconds, memory))
    typical_gap, longest_gap = float(np.median([one.typical_gap for one in quiet])), max(one.longest_gap for one in quiet)
    longest_health, most_memory = max(one.longest_health for one in quiet), max(one.memory for one in quiet)
    print(f"{'none, in as much time':34}{typical_gap:8.1f}{longest_gap:9.1f}{longest_health:9.1f}{most_memory:9.0f}")
    longest = np.array([[one.longest_gap for one in noticed] for noticed in (beside, quiet)]).reshape(2, options.rounds, -1).max(2)
    ratios = longest[0] / longest[1]
    worst, slowest = float(np.median(ratios)), max(one.longest_health for one in beside)
    print(f"longest gap {worst:.2f} of that without an attack (at most 2; by round {', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    print(f"/health at most {slowest:.0f} ms (at most 100)")
    growth = beside[-1].memory / quiet[0].memory - 1
    print(f"memory {growth:+.1%} in the end (at most +10%)")
    return int(worst > 2 or slowest > 100 or growth > 0.1)


if __name__ == "__main__":
    sys.exit(main())
