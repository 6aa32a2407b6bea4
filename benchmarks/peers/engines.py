"""Who is compared: each engine's settings, how its worker and its server are started, and what it needs to be there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.venvs import LLAMA_CPP, PARITY, VLLM, Recipe
from benchmarks.worker import Worker

OURS = "jaxinfer"


@dataclass(frozen=True)
class ServerCommand:
    command: Sequence[str]  # without --host and --port
    ready_path: str  # answers 200 when it is ready
    body: Mapping[str, Any]  # of a completion request: what keeps it from ending early, in its words
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    family: str
    variant: str  # how weights are held
    bits: int  # a weight; the peers at 16 and 32 are those a ratio is taken to
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the worker
    recipe: Recipe | None = None  # its environment; None: this one
    weights: str = "model"  # what it reads: the model itself, a float GGUF file made of it, or a Hugging Face folder made of it
    gives_logits: bool = True  # of each position of a text

    @property
    def name(self) -> str:
        return f"{self.family} {self.variant}"

    @property
    def is_ours(self) -> bool:
        return self.family == OURS

    @property
    def python(self) -> str:
        return str(self.recipe.python) if self.recipe else sys.executable

    def worker(self, model: Path, threads: int, context: int, environment: Mapping[str, str] | None = None, **settings: Any) -> Worker:
        """Its process, ready for sequences of `context` tokens. `settings` beside its own. Raises `WorkerError`."""
        about = {"name": self.name, "model": str(model), "threads": threads, "context": context, **self.settings, **settings}
        given = vllm_environment(threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if self.family == "vLLM" else {}
        return Worker(
            self.python, f"benchmarks.peers.{MODULES[self.family]}", json.dumps(about), environment=given | dict(environment or {})
        )

    def server(self, model: Path, threads: int, context: int) -> ServerCommand | None:
        """How its server is started; None where it has none that is made for load."""
        return SERVERS[self.family](self, model, threads, context)


def _this_server(engine: Engine, model: Path, threads: int, context: int) -> ServerCommand:
    flags = [word for name, value in engine.settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [engine.python, "-m", "server.cli", "serve", "--model", str(model), *flags, "--no-prefix-cache"]
    return ServerCommand(command, "/ready", {"ignore_eos": True})


def _llama_cpp_server(engine: Engine, model: Path, threads: int, context: int) -> ServerCommand:
    # One sequence at a time is all it has: a request that comes meanwhile must wait, not end the one before.
    flags = {"model": model, "n_threads": threads, "n_threads_batch": threads, "n_ctx": context, "logits_all": False}
    flags |= {"interrupt_requests": False, "flash_attn": True, "verbose": False}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return ServerCommand([engine.python, "-m", "llama_cpp.server", *words], "/v1/models", {})  # it can't be told to ignore the end


def _vllm_server(engine: Engine, model: Path, threads: int, context: int) -> ServerCommand:
    command = [engine.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", engine.settings["dtype"]]
    command += ["--max-model-len", str(context), "--no-enable-prefix-caching", "--disable-log-stats"]
    return ServerCommand(command, "/health", {"ignore_eos": True}, vllm_environment(threads))


def _no_server(engine: Engine, model: Path, threads: int, context: int) -> None:
    """`transformers serve` is not made for load: a request at a time, streams that end without [DONE], and on two cores its answers came at a
    tenth of the rate of the loop in `transformers_engine`; its continuous batching, which wants a GPU's attention, was slower still."""


def vllm_environment(threads: int) -> dict[str, str]:
    """What its CPU build wants to know before it is imported. KV cache in GiB."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


MODULES = {OURS: "this_engine", "transformers": "transformers_engine", "llama.cpp": "llama_cpp_engine", "vLLM": "vllm_engine"}
SERVERS = {OURS: _this_server, "transformers": _no_server, "llama.cpp": _llama_cpp_server, "vLLM": _vllm_server}

ENGINES = (
    Engine(OURS, "float32", 32, {"dtype": "float32"}),
    Engine(OURS, "bfloat16", 16, {"dtype": "bfloat16"}),
    Engine(OURS, "int8", 8, {"weights": "int8"}),
    Engine("transformers", "float32", 32, {"dtype": "float32"}, PARITY, "folder"),
    Engine("transformers", "bfloat16", 16, {"dtype": "bfloat16"}, PARITY, "folder"),
    Engine("llama.cpp", "Q4_1", 4, {}, LLAMA_CPP, "gguf"),
    Engine("llama.cpp", "BF16", 16, {}, LLAMA_CPP, "gguf BF16"),  # the fastest of its float types where the processor has products of it
    Engine("vLLM", "bfloat16", 16, {"dtype": "bfloat16"}, VLLM, "folder", gives_logits=False),
)


def chosen(names: Sequence[str], engines: Sequence[Engine] = ENGINES) -> list[Engine]:
    """The engines whose name begins so, '-' for ' ' and in any case: 'jaxinfer', 'llama.cpp-q4_1'. Raises ValueError for a name of none."""
    if not names:
        return list(engines)
    wanted = [name.lower().replace("-", " ") for name in names]
    for name in wanted:
        if not any(engine.name.lower().startswith(name) for engine in engines):
            raise ValueError(f"no engine is called {name!r}: there are {', '.join(e.name.replace(' ', '-') for e in engines)}")
    return [engine for engine in engines if engine.name.lower().startswith(tuple(wanted))]
