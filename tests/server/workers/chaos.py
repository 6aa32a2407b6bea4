"""`make chaos ARGS="--minutes 10 --seed 1"`: two routers and three workers, as processes, under load; at random moments
one is killed (-9), stopped (SIGSTOP) and let go on, or started anew (SIGTERM), and clients leave.

What must hold: every answer has an undisturbed engine's tokens, none takes longer than its deadline, and after each
round every page of every worker is free again within the lease. A client whose router ends asks the other one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests import tiny_model
from tests.conftest import QUICK_COMPILATION, TINY
from tests.server.workers.cluster import Cluster, Stream

WORKERS = {"one": "both", "two": "prefill", "three": "decode"}
# They differ in all that may: pages come from other sizes and layouts.
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"kv_host_memory": "4MiB", "kv_transport": "auto"},
    "two": {"page_size": 24, "kv_compression": "on", "kv_transport": "auto"},
    "three": {"kv_transport": "jax", "page_size": 8, "cpu_devices": 2, "prefill_parallel": "pp=2", "decode_parallel": "pp=2"},
}
ROUTERS = ("router", "second router")
LEASE_SECONDS = 35.0  # and what a look takes
ANSWER_SECONDS = 120.0


class Failed(Exception):
    """Something that must hold does not."""


class Requests:
    """Prompts with the tokens that an undisturbed engine gives."""

    def __init__(self, model: Path, rng: random.Random, number: int = 24) -> None:
        from jaxinfer.llm import LLM
        from jaxinfer.request import SamplingParams

        self.bodies: list[dict[str, Any]] = []
        for _ in range(number):
            prompt = [rng.randrange(500) for _ in range(rng.choice((3, 40, 90, 150, 200)))]
            kind = rng.choice(({"temperature": 0.0}, {"temperature": 0.8, "seed": rng.randrange(1000)}))
            self.bodies.append({"prompt": prompt, "max_tokens": rng.randrange(20, 200), "ignore_eos": True, **kind})
        with LLM(str(model), **TINY) as llm:

            def generate(factor: float) -> list[list[int]]:
                params = [
                    SamplingParams(
                        max_tokens=body["max_tokens"], temperature=body["temperature"] * factor, seed=body.get("seed"), ignore_eos=True
                    )
                    for body in self.bodies
                ]
                return [output.outputs[0].token_ids for output in llm.generate([body["prompt"] for body in self.bodies], params)]

            found = [generate(factor) for factor in (1.0, 1.0 - 1e-5, 1.0 + 1e-5)]
        # Where tokens tie within rounding, a migration may find another one: that says nothing.
        kept = [number for number, tokens in enumerate(found[0]) if all(other[number] == tokens for other in found)]
        self.bodies, self.tokens = [self.bodies[number] for number in kept], [found[0][number] for number in kept]


class Chaos:
    """Rounds of load and faults."""

    def __init__(self, cluster: Cluster, requests: Requests, rng: random.Random) -> None:
        self._cluster, self._requests, self._rng = cluster, requests, rng
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        for router in ROUTERS:
            self._cluster.start_router(router)
        for name, role in WORKERS.items():
            self._cluster.start_worker(name, role, **SETTINGS[name])
            self._cluster.wait_for(name, "is ready")
        self._wait_for_all()

    def round(self) -> None:
        """Load, one fault in the midst of it, and what must hold."""
        chosen = [self._rng.randrange(len(self._requests.bodies)) for _ in range(8)]
        streams = [(number, self._ask(number, self._rng.choice(ROUTERS))) for number in chosen]
        for _ in range(self._rng.randrange(3)):
            self._leave()
        time.sleep(self._rng.uniform(0.0, 0.6))
        fault = self._rng.choice((self._kill_worker, self._stop_worker, self._restart_worker, self._kill_router, self._stop_router))
        said = fault()
        self.counts[fault.__name__.strip("_")] += 1
        for number, stream in streams:
            self._check(number, stream, said)
        self._wait_for_all()
        self._check_free(said)

    def _ask(self, number: int, router: str) -> Stream:
        return Stream(self._cluster.url_of(router), **self._requests.bodies[number])

    def _leave(self) -> None:
        with suppress(httpx.HTTPError):
            timeout = httpx.Timeout(5.0, read=self._rng.uniform(0.001, 0.2))
            httpx.post(
                f"{self._cluster.url_of(ROUTERS[0])}/v1/completions", json={"model": "tiny", **self._requests.bodies[0]}, timeout=timeout
            )
        self.counts["left"] += 1

    def _check(self, number: int, stream: Stream, said: str) -> None:
        expected = self._requests.tokens[number]
        stream.join(ANSWER_SECONDS)
        for router in ROUTERS:  # its own router ended: any other has the answer
            if stream.error is None or not said.endswith("router"):
                break
            self.counts["asked again"] += 1
            stream = self._ask(number, router)
            stream.join(ANSWER_SECONDS)
        if stream.is_alive():
            raise Failed(f"{said}: a request has no answer after {ANSWER_SECONDS:g} s")
        if stream.error is not None or stream.tokens != expected:
            same = next((n for n, pair in enumerate(zip(stream.tokens, expected, strict=False)) if pair[0] != pair[1]), None)
            raise Failed(f"{said}: request {number}: {stream.error}; {len(stream.tokens)} of {len(expected)} tokens, wrong from {same}")
        self.counts["right"] += 1

    def _check_free(self, said: str) -> None:
        deadline = time.monotonic() + LEASE_SECONDS
        while held := [
            load for load in self._cluster.loads(*WORKERS) if load.num_used_pages or load.num_kept_handoffs or load.num_incoming
        ]:
            if time.monotonic() > deadline:
                raise Failed(f"{said}: pages are held: {held}")
            time.sleep(0.1)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        for router in ROUTERS:
            while self._cluster.num_workers(router) < len(WORKERS):
                if time.monotonic() > deadline:
                    raise Failed(f"{router} has {self._cluster.num_workers(router)} workers:\n{self._cluster.log(router)[-3000:]}")
                time.sleep(0.05)

    def _kill_worker(self) -> str:
        name = self._rng.choice(list(WORKERS))
        self._cluster.signal(name, signal.SIGKILL)
        self._start_again(name)
        return f"kill -9 of {name} ({WORKERS[name]})"

    def _restart_worker(self) -> str:
        name = self._rng.choice(list(WORKERS))
        self._cluster.signal(name, signal.SIGTERM)
        self._cluster.processes[name].wait(60)
        self._start_again(name)
        return f"SIGTERM of {name} ({WORKERS[name]})"

    def _stop_worker(self) -> str:
        name = self._rng.choice(list(WORKERS))
        self._cluster.signal(name, signal.SIGSTOP)
        time.sleep(self._rng.choice((0.5, 5.0, 12.0)))
        self._cluster.signal(name, signal.SIGCONT)
        time.sleep(1.0)  # it has to learn that it was taken for lost
        return f"SIGSTOP of {name} ({WORKERS[name]})"

    def _kill_router(self) -> str:
        name = self._rng.choice(ROUTERS)
        self._cluster.signal(name, signal.SIGKILL)
        self._cluster.start_router(name)
        self._cluster.wait_until_ready(name)
        return f"kill -9 of {name}"

    def _stop_router(self) -> str:
        name = self._rng.choice(ROUTERS)
        self._cluster.signal(name, signal.SIGSTOP)
        time.sleep(self._rng.choice((0.5, 4.0)))
        self._cluster.signal(name, signal.SIGCONT)
        time.sleep(1.0)
        return f"SIGSTOP of {name}"

    def _start_again(self, name: str) -> None:
        self._cluster.start_worker(name, WORKERS[name], **SETTINGS[name])
        self._cluster.wait_for(name, "is ready")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.environ |= QUICK_COMPILATION
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.write(Path(folder) / "tiny")
        cluster = Cluster(model, Path(folder))
        chaos = Chaos(cluster, Requests(model, rng), rng)
        try:
            chaos.start()
            end = time.monotonic() + 60 * given.minutes
            while time.monotonic() < end:
                chaos.round()
                print(", ".join(f"{name} {count}" for name, count in sorted(chaos.counts.items())), flush=True)
        except BaseException:
            for name in cluster.processes:
                print(f"-- {name}\n{cluster.log(name)[-1500:]}")
            raise
        finally:
            cluster.close()
    print(f"held for {given.minutes:g} minutes, seed {given.seed}")


if __name__ == "__main__":
    main()
