"""From nothing to the first token: a new process each time, with empty caches of its own and then with those it left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.machine import Others
from benchmarks.peers.engines import Engine
from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import last_line, rotated
from benchmarks.worker import WorkerError
from benchmarks.workload import Case

PART = "start"
CONTEXT = 4096  # tokens that a sequence may have


def caches(folder: Path) -> dict[str, str]:
    """Environment variables by which every engine keeps what it compiles under this folder."""
    names = ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return {name: str(folder / name.lower()) for name in names}


def measure_starts(
    engines: Sequence[Engine],
    models: Mapping[str, Path],
    threads: int,
    rounds: int,
    case: Case,
    measures: Measures,
    lost: dict[str, str],
    others: Others,
    say: Callable[[str], None],
) -> None:
    """Seconds from the process's start to the first token of `case`, a short prompt. What the system keeps of files in memory can't be
    emptied without being root: a cold start reads files that were read before."""
    by_name = {engine.name: engine for engine in engines}
    for number in range(rounds):
        for name in rotated(list(by_name), number):
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


def _start(engine: Engine, model: Path, threads: int, case: Case, seed: int, environment: Mapping[str, str]) -> float:
    began = time.perf_counter()
    worker = engine.worker(model, threads, CONTEXT, environment)
    try:
        worker.ask(case=case.as_json(), seed=seed, once=True)
        return time.perf_counter() - began
    finally:
        worker.close()
