"""From process start to the first token: a new process each time, first with empty caches, then with the caches that it
left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.machine import BackgroundLoad
from benchmarks.peers.engines import PeerEngine
from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import last_line, rotate
from benchmarks.worker import WorkerError
from benchmarks.workload import WorkloadCase

PART = "start"
CONTEXT = 4096  # most tokens of a sequence


def caches(folder: Path) -> dict[str, str]:
    """Environment variables that make every engine store its compiled programs under this folder."""
    names = ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return {name: str(folder / name.lower()) for name in names}


def measure_starts(
    engines: Sequence[PeerEngine],
    models: Mapping[str, Path],
    threads: int,
    rounds: int,
    case: WorkloadCase,
    measures: Measures,
    lost: dict[str, str],
    others: BackgroundLoad,
    say: Callable[[str], None],
) -> None:
    """Seconds from the process's start to the first token of `case`, a short prompt. Only root can empty the system's
    file cache: a cold start reads files that were read before."""
    by_name = {engine.name: engine for engine in engines}
    for number in range(rounds):
        for name in rotate(list(by_name), number):
            with tempfile.TemporaryDirectory(prefix="jaxinfer-start-") as folder:
                environment = caches(Path(folder))
                for kind in ("cold", "warm"):
                    if name in lost:
                        continue
                    say(f"round {number + 1} of {rounds}: {kind} start, {name}")
                    others.look()
                    try:
                        seconds = _start(by_name[name], models[name], threads, case, number, environment)
                    except WorkerError as error:
                        lost[name] = f"{kind} start: {last_line(error)}"
                        continue
                    others.keep()
                    measures.add(PART, f"{kind} start to first token", "s", name, seconds, is_higher_better=False)


def _start(engine: PeerEngine, model: Path, threads: int, case: WorkloadCase, seed: int, environment: Mapping[str, str]) -> float:
    began = time.perf_counter()
    worker = engine.worker(model, threads, CONTEXT, environment)
    try:
        worker.ask(case=case.as_json(), seed=seed, once=True)
        return time.perf_counter() - began
    finally:
        worker.close()
